#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#define KVTERRACE_CRC32C_TARGET __attribute__((target("sse4.2")))
#elif defined(__aarch64__) && defined(__linux__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#if defined(__clang__)
#define KVTERRACE_CRC32C_TARGET __attribute__((target("crc")))
#else
#define KVTERRACE_CRC32C_TARGET __attribute__((target("+crc")))
#endif
#endif

namespace kvterrace::record {
namespace {

static_assert(std::endian::native == std::endian::little, "tables and loads assume a little-endian CPU");

constexpr std::uint32_t kPolynomial = 0x82F63B78;  // reflected: bit 31 is x^0

using Bytes = const unsigned char*;

// a times b modulo the polynomial.
constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) noexcept {
  std::uint32_t product = 0;
  for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = (b & 1) ? (b >> 1) ^ kPolynomial : b >> 1;
  }
  return product;
}

// x to the power of 8 x nbytes: what `nbytes` more bytes multiply a CRC by.
constexpr std::uint32_t shift_factor(std::uint64_t nbytes) noexcept {
  std::uint32_t factor = 1u << 31;
  for (std::uint32_t power = 1u << 23; nbytes != 0; nbytes >>= 1) {
    if (nbytes & 1) factor = multiply(power, factor);
    power = multiply(power, power);
  }
  return factor;
}

// Multiplication by one fixed factor, four look-ups.
class Shift {
 public:
  explicit Shift(std::uint64_t nbytes) noexcept {
    const std::uint32_t factor = shift_factor(nbytes);
    for (std::uint32_t at = 0; at < 4; ++at)
      for (std::uint32_t byte = 0; byte < 256; ++byte) table_[at][byte] = multiply(factor, byte << (8 * at));
  }
  std::uint64_t operator()(std::uint64_t crc) const noexcept {
    return table_[0][crc & 255] ^ table_[1][crc >> 8 & 255] ^ table_[2][crc >> 16 & 255] ^ table_[3][crc >> 24 & 255];
  }

 private:
  std::array<std::array<std::uint32_t, 256>, 4> table_;
};

// `table[k][byte]`: what a byte becomes when k zero bytes follow it.
using Slices = std::array<std::array<std::uint32_t, 256>, 8>;

const Slices& slices() noexcept {
  static const Slices table = [] {
    Slices made{};
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc & 1) ? (crc >> 1) ^ kPolynomial : crc >> 1;
      made[0][byte] = crc;
    }
    for (std::uint32_t byte = 0; byte < 256; ++byte)
      for (std::size_t at = 1; at < 8; ++at) made[at][byte] = (made[at - 1][byte] >> 8) ^ made[0][made[at - 1][byte] & 255];
    return made;
  }();
  return table;
}

inline std::uint64_t load(Bytes at) noexcept {
  std::uint64_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

#if defined(KVTERRACE_CRC32C_TARGET)

// Lanes of one stretch. The instruction takes three cycles and one can start in each: three lanes keep it busy. A long lane
// is a page: with shorter ones the CPU does not see three streams to read ahead in (measured: 6 against 10 GB/s).
constexpr std::size_t kLongLane = 4096;
constexpr std::size_t kShortLane = 256;
constexpr std::size_t kLine = 64;
// How far ahead a line is asked for.
constexpr std::size_t kAheadNbytes = 512;

#if defined(__x86_64__)
KVTERRACE_CRC32C_TARGET inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) noexcept {
  return _mm_crc32_u64(crc, word);
}
KVTERRACE_CRC32C_TARGET inline std::uint64_t step_byte(std::uint64_t crc, unsigned char byte) noexcept {
  return _mm_crc32_u8(static_cast<std::uint32_t>(crc), byte);
}
bool hardware() noexcept { return __builtin_cpu_supports("sse4.2"); }
constexpr const char* kHardware = "sse4.2";
#else
KVTERRACE_CRC32C_TARGET inline std::uint64_t step(std::uint64_t crc, std::uint64_t word) noexcept {
  return __crc32cd(static_cast<std::uint32_t>(crc), word);
}
KVTERRACE_CRC32C_TARGET inline std::uint64_t step_byte(std::uint64_t crc, unsigned char byte) noexcept {
  return __crc32cb(static_cast<std::uint32_t>(crc), byte);
}
bool hardware() noexcept { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
constexpr const char* kHardware = "armv8";
#endif

template <std::size_t lane>
inline void ask_ahead(Bytes at) noexcept {
  if constexpr (lane == kLongLane)
    for (std::size_t one = 0; one < 3; ++one) __builtin_prefetch(at + one * lane + kAheadNbytes);
}

KVTERRACE_CRC32C_TARGET inline std::uint64_t line(std::uint64_t crc, Bytes from) noexcept {
#pragma GCC unroll 8
  for (std::size_t at = 0; at < kLine; at += 8) crc = step(crc, load(from + at));
  return crc;
}

template <std::size_t lane>
KVTERRACE_CRC32C_TARGET inline std::uint64_t stretches(std::uint64_t crc, Bytes& at, std::size_t& nbytes) noexcept {
  static const Shift shift(lane);
  for (; nbytes >= 3 * lane; nbytes -= 3 * lane, at += 3 * lane) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t done = 0; done < lane; done += kLine) {
      ask_ahead<lane>(at + done);
      crc = line(crc, at + done);
      second = line(second, at + lane + done);
      third = line(third, at + 2 * lane + done);
    }
    crc = shift(shift(crc) ^ second) ^ third;
  }
  return crc;
}

KVTERRACE_CRC32C_TARGET std::uint32_t crc32c_hardware(const void* data, std::size_t nbytes,
                                                      std::uint32_t value) noexcept {
  auto at = static_cast<Bytes>(data);
  std::uint64_t crc = static_cast<std::uint32_t>(~value);
  for (; nbytes != 0 && reinterpret_cast<std::uintptr_t>(at) % 8 != 0; --nbytes) crc = step_byte(crc, *at++);
  crc = stretches<kLongLane>(crc, at, nbytes);
  crc = stretches<kShortLane>(crc, at, nbytes);
  for (; nbytes >= 8; nbytes -= 8, at += 8) crc = step(crc, load(at));
  for (; nbytes != 0; --nbytes) crc = step_byte(crc, *at++);
  return ~static_cast<std::uint32_t>(crc);
}

#else
constexpr const char* kHardware = "";
bool hardware() noexcept { return false; }
std::uint32_t crc32c_hardware(const void* data, std::size_t nbytes, std::uint32_t value) noexcept {
  return crc32c_software(data, nbytes, value);
}
#endif

bool use_hardware() noexcept {
  static const bool answer = hardware();
  return answer;
}

#if defined(__x86_64__)

// What is left of a stretch of pages is copied and summed in shorter lanes.
constexpr std::size_t kStreamLane = 512;
constexpr std::size_t kCopyAheadNbytes = 1024;

// One line: each word is loaded once, summed and stored.
KVTERRACE_CRC32C_TARGET inline std::uint64_t stream_line(std::uint64_t crc, unsigned char* to, Bytes from) noexcept {
#pragma GCC unroll 8
  for (std::size_t at = 0; at < kLine; at += 8) {
    const std::uint64_t word = load(from + at);
    crc = step(crc, word);
    _mm_stream_si64(reinterpret_cast<long long*>(to + at), static_cast<long long>(word));
  }
  return crc;
}

// Whole stretches only, `to` on a line; moves the three along.
template <std::size_t lane>
KVTERRACE_CRC32C_TARGET std::uint32_t stream_stretches(unsigned char*& to, Bytes& from, std::size_t& nbytes,
                                                       std::uint32_t value) noexcept {
  static const Shift shift(lane);
  std::uint64_t crc = static_cast<std::uint32_t>(~value);
  for (; nbytes >= 3 * lane; nbytes -= 3 * lane, to += 3 * lane, from += 3 * lane) {
    std::uint64_t second = 0, third = 0;
    for (std::size_t at = 0; at < lane; at += kLine) {
      ask_ahead<lane>(from + at);
      crc = stream_line(crc, to + at, from + at);
      second = stream_line(second, to + lane + at, from + lane + at);
      third = stream_line(third, to + 2 * lane + at, from + 2 * lane + at);
    }
    crc = shift(shift(crc) ^ second) ^ third;
  }
  return ~static_cast<std::uint32_t>(crc);
}

// Bytes up to the next line: streaming a part of a line costs more than it saves.
std::size_t to_line(const void* at, std::size_t nbytes) noexcept {
  const std::size_t rest = (kLine - reinterpret_cast<std::uintptr_t>(at) % kLine) % kLine;
  return rest < nbytes ? rest : nbytes;
}

#endif

// Copied and summed a piece at a time: it is still in the first-level cache when it is summed.
constexpr std::size_t kPieceNbytes = 4096;

}  // namespace

std::uint32_t crc32c_software(const void* data, std::size_t nbytes, std::uint32_t value) noexcept {
  const Slices& table = slices();
  auto at = static_cast<Bytes>(data);
  std::uint32_t crc = ~value;
  for (; nbytes >= 8; nbytes -= 8, at += 8) {
    const std::uint64_t word = load(at) ^ crc;
    crc = table[7][word & 255] ^ table[6][word >> 8 & 255] ^ table[5][word >> 16 & 255] ^ table[4][word >> 24 & 255] ^
          table[3][word >> 32 & 255] ^ table[2][word >> 40 & 255] ^ table[1][word >> 48 & 255] ^ table[0][word >> 56];
  }
  for (; nbytes != 0; --nbytes) crc = (crc >> 8) ^ table[0][(crc ^ *at++) & 255];
  return ~crc;
}

std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value) noexcept {
  return use_hardware() ? crc32c_hardware(data, nbytes, value) : crc32c_software(data, nbytes, value);
}

std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b) noexcept {
  return multiply(shift_factor(nbytes_b), crc_a) ^ crc_b;
}

const char* crc32c_kernel() noexcept { return use_hardware() ? kHardware : "software"; }

std::uint32_t copy_crc32c(void* dst, const void* src, std::size_t nbytes, std::uint32_t value) noexcept {
  auto to = static_cast<unsigned char*>(dst);
  auto from = static_cast<Bytes>(src);
  while (nbytes != 0) {
    const std::size_t piece = nbytes < kPieceNbytes ? nbytes : kPieceNbytes;
    std::memcpy(to, from, piece);
    value = crc32c(to, piece, value);
    to += piece, from += piece, nbytes -= piece;
  }
  return value;
}

#if defined(__x86_64__)

std::uint32_t stream_crc32c(void* dst, const void* src, std::size_t nbytes, std::uint32_t value) noexcept {
  auto to = static_cast<unsigned char*>(dst);
  auto from = static_cast<Bytes>(src);
  if (nbytes >= 3 * kStreamLane + kLine && use_hardware()) {
    const std::size_t head = to_line(to, nbytes);
    value = copy_crc32c(to, from, head, value);
    to += head, from += head, nbytes -= head;
    value = stream_stretches<kLongLane>(to, from, nbytes, value);
    value = stream_stretches<kStreamLane>(to, from, nbytes, value);
  }
  return copy_crc32c(to, from, nbytes, value);
}

void stream_copy(void* dst, const void* src, std::size_t nbytes) noexcept {
  auto to = static_cast<unsigned char*>(dst);
  auto from = static_cast<Bytes>(src);
  const std::size_t head = to_line(to, nbytes);
  std::memcpy(to, from, head);
  to += head, from += head, nbytes -= head;
  for (; nbytes >= kLine; nbytes -= kLine, to += kLine, from += kLine) {
    __builtin_prefetch(from + kCopyAheadNbytes);
    for (std::size_t at = 0; at < kLine; at += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  }
  std::memcpy(to, from, nbytes);
}

void end_streams() noexcept { _mm_sfence(); }

#else

std::uint32_t stream_crc32c(void* dst, const void* src, std::size_t nbytes, std::uint32_t value) noexcept {
  return copy_crc32c(dst, src, nbytes, value);
}

void stream_copy(void* dst, const void* src, std::size_t nbytes) noexcept { std::memcpy(dst, src, nbytes); }

void end_streams() noexcept {}

#endif

}  // namespace kvterrace::record
