// Arbitrary bytes as a record that a read has brought: whatever they are, the pass reads nothing outside them, and writes to
// the caller only what is verified. For libFuzzer:
//
//   clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -Inative/src native/tests/record_fuzz.cpp
//       native/src/record/{crc32c,header,places,hooks}.cpp -o record_fuzz && ./record_fuzz -max_total_time=60
//
// Without libFuzzer, -DKVTERRACE_FUZZ_MAIN adds a driver of its own: `record_fuzz SECONDS [SEED]`.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "record/crc32c.h"
#include "record/hooks.h"

using namespace kvterrace::record;

namespace {

constexpr std::size_t kParts = 3, kPartNbytes = 96, kBlockNbytes = kParts * kPartNbytes;
constexpr std::uint64_t kOffset = 8192, kPutSeq = 9;
constexpr std::uint8_t kUntouched = 0xA5;

const RecordShape& shape() {
  static const RecordShape made{{1}, 2, kPageNbytes, kBlockNbytes, {96, 96, 96}, {0, 96, 192}};
  return made;
}

const NewBlock kBlock{{3}, {4}, {5}, kPutSeq, 6, 7};
const Id kNonce{8};

// A right record; the input is laid over it, so that most of the bytes make sense.
std::vector<std::uint8_t> right_record() {
  std::vector<std::uint8_t> record(2 * kPageNbytes);
  std::uint32_t crcs[kParts];
  for (std::size_t part = 0; part < kParts; ++part) {
    std::uint8_t* bytes = record.data() + kPageNbytes + part * kPartNbytes;
    for (std::size_t at = 0; at < kPartNbytes; ++at) bytes[at] = static_cast<std::uint8_t>(at * 7 + part);
    crcs[part] = crc32c(bytes, kPartNbytes);
  }
  encode_header(kBlock, shape(), crcs, record.data());
  std::memcpy(record.data() + 24, kNonce.data(), sizeof kNonce);
  std::memcpy(record.data() + 40, &kOffset, sizeof kOffset);
  return record;
}

void renew_crc(std::vector<std::uint8_t>& record) {
  std::uint32_t nbytes;
  std::memcpy(&nbytes, record.data() + 12, 4);
  if (nbytes < kFixedNbytes || nbytes > record.size()) return;
  std::memset(record.data() + 16, 0, 4);
  const std::uint32_t crc = crc32c(record.data(), nbytes);
  std::memcpy(record.data() + 16, &crc, 4);
}

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

// Input: a byte of choices, two bytes of length, then patches of (place: 2 bytes, value: 1 byte).
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t nbytes) {
  if (nbytes < 3) return 0;
  static const std::vector<std::uint8_t> right = right_record();
  const std::uint8_t choices = data[0];
  std::vector<std::uint8_t> record = right;
  std::size_t length = record.size();
  if (choices & 1) length = (data[1] | data[2] << 8) % (record.size() + 1);
  if (choices & 2) {  // bytes as they come
    length = nbytes - 3;
    record.assign(data + 3, data + nbytes);
  } else {
    for (std::size_t at = 3; at + 3 <= nbytes; at += 3) {
      std::size_t place = data[at] | data[at + 1] << 8;
      if (choices & 4) place %= kFixedNbytes + kParts * kPartEntryNbytes;
      record[place % record.size()] = data[at + 2];
    }
  }
  if ((choices & 8) && record.size() >= kFixedNbytes) renew_crc(record);
  // An allocation of exactly these bytes: one read behind them is seen.
  std::unique_ptr<std::uint8_t[]> memory(new std::uint8_t[length]);
  if (length != 0) std::memcpy(memory.get(), record.data(), length);

  std::vector<std::uint8_t> caller(2 * kBlockNbytes, kUntouched);
  const Places places({Piece{caller.data(), {2, kBlockNbytes}, {kBlockNbytes, 1}, 1}}, shape().part_nbytes, 0);
  Claims claims(2);
  Landing landing{{memory.get(), length}, &shape(), {kBlock.key, kPutSeq, kNonce, kOffset}, {}, 0,
                  Target{&places, 1, &claims, 1}, Landed::unseen, false, {}};
  if (choices & 16) landing.parts = {false, (choices >> 5) & 3, (choices >> 5) & 7};
  if (choices & 16) landing.target = {};
  VerifyHook({&landing}).run({0, 0});

  require(landing.landed != Landed::unseen && landing.landed != Landed::missing);
  require((landing.landed == Landed::right) == !landing.fault);
  if (!(choices & 16) && length >= kPageNbytes + kBlockNbytes) {
    // The same payload in runs, each an allocation of its own, is judged the same.
    const std::size_t cut = data[1] % (kBlockNbytes + 1);
    std::vector<std::uint8_t> head(memory.get(), memory.get() + kPageNbytes);
    std::vector<std::uint8_t> front(memory.get() + kPageNbytes, memory.get() + kPageNbytes + cut);
    std::vector<std::uint8_t> back(memory.get() + kPageNbytes + cut, memory.get() + kPageNbytes + kBlockNbytes);
    Landing parted{{head.data(), head.size()}, &shape(), {kBlock.key, kPutSeq, kNonce, kOffset}, {}, 0, {},
                   Landed::unseen, false, {}};
    parted.runs = {{front.data(), front.size()}, {back.data(), back.size()}};
    ReadHook({&parted}).run({static_cast<std::int64_t>(kPageNbytes + kBlockNbytes), 0});
    require(parted.landed == landing.landed && parted.copied == (parted.landed == Landed::right));
    if (parted.fault.reason != Reason::header_cut)  // there is no more of a header than its page
      require(parted.fault.reason == landing.fault.reason && parted.fault.numbers == landing.fault.numbers);
  }
  for (std::size_t at = 0; at < kBlockNbytes; ++at) require(caller[at] == kUntouched);
  if (landing.copied) {
    require(landing.landed == Landed::right && claims.settle(1) == Claims::Settled::first);
    require(std::memcmp(caller.data() + kBlockNbytes, memory.get() + kPageNbytes, kBlockNbytes) == 0);
  } else {
    for (const std::uint8_t byte : caller) require(byte == kUntouched);
  }
  return 0;
}

#if defined(KVTERRACE_FUZZ_MAIN)
#include <chrono>
#include <cstdio>
#include <random>

int main(int count, char** words) {
  const double seconds = count > 1 ? std::atof(words[1]) : 10;
  std::mt19937 random(count > 2 ? static_cast<unsigned>(std::atol(words[2])) : 1);
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  unsigned long runs = 0;
  for (; std::chrono::steady_clock::now() < end; ++runs) {
    const bool many = random() % 16 == 0;
    std::vector<std::uint8_t> input(3 + random() % (many ? 9000 : 13));
    for (std::uint8_t& byte : input) byte = static_cast<std::uint8_t>(random());
    LLVMFuzzerTestOneInput(input.data(), input.size());
  }
  std::printf("%lu inputs\n", runs);
}
#endif
