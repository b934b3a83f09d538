#include "header.h"

#include <bit>
#include <cstring>

#include "crc32c.h"

namespace kvterrace::record {
namespace {

static_assert(std::endian::native == std::endian::little, "fields are copied as they lie");

constexpr std::uint8_t kMagic[8] = {'K', 'V', 'T', 'R', 'E', 'C', 'R', 'D'};
constexpr std::uint16_t kVersion = 1, kBlock = 1, kTombstone = 2, kRaw = 0;
constexpr std::size_t kCrcAt = 16, kKeyNbytes = 32, kMaxTombstoneKeys = 32768;
constexpr std::size_t kMaxHeaderNbytes = header_nbytes_for(kMaxParts);
constexpr std::uint64_t kMaxPayload = 0xFFFFFFFF;

template <class T>
T get(const std::uint8_t* bytes, std::size_t at) noexcept {
  T value;
  std::memcpy(&value, bytes + at, sizeof value);
  return value;
}

template <class T>
void put(std::uint8_t* bytes, std::size_t at, T value) noexcept {
  std::memcpy(bytes + at, &value, sizeof value);
}

// With the CRC field taken as zero.
std::uint32_t header_crc(const std::uint8_t* bytes, std::size_t nbytes) noexcept {
  static constexpr std::uint8_t zeros[4] = {};
  const std::uint32_t front = crc32c(zeros, 4, crc32c(bytes, kCrcAt));
  return crc32c(bytes + kCrcAt + 4, nbytes - kCrcAt - 4, front);
}

template <class... Numbers>
Fault fault(Reason reason, Numbers... numbers) noexcept {
  return Fault{reason, {static_cast<std::uint64_t>(numbers)...}, {}};
}

Fault fault_found(Reason reason, const std::uint8_t* found, std::size_t nbytes) noexcept {
  Fault made{reason, {}, {}};
  std::memcpy(made.found.data(), found, nbytes);
  return made;
}

Fault check_table(const Header& header) noexcept {
  if (header.payload_nbytes > kMaxPayload) return fault(Reason::payload, header.parts, header.payload_nbytes);
  std::uint64_t end = 0;
  for (std::size_t number = 0; number < header.parts; ++number) {
    const Part part = header.part(number);
    if (part.offset < end) return fault(Reason::table, header.payload_nbytes);
    end = std::uint64_t{part.offset} + part.nbytes;
  }
  if (end > header.payload_nbytes) return fault(Reason::table, header.payload_nbytes);
  if (header.kind == kTombstone) {
    const std::uint64_t keys = header.payload_nbytes / kKeyNbytes;
    if (header.parts != 1 || header.part(0).nbytes != header.payload_nbytes || header.payload_nbytes % kKeyNbytes != 0 ||
        keys < 1 || keys > kMaxTombstoneKeys)
      return fault(Reason::tombstone, header.parts, header.payload_nbytes);
  }
  return {};
}

}  // namespace

Part Header::part(std::size_t number) const noexcept {
  const std::uint8_t* at = table + number * kPartEntryNbytes;
  return {get<std::uint32_t>(at, 0), get<std::uint32_t>(at, 4), get<std::uint32_t>(at, 8), get<std::uint32_t>(at, 12)};
}

std::size_t RecordShape::record_nbytes() const noexcept { return header_nbytes + pad_to_page(payload_nbytes); }

Fault decode_header(const std::uint8_t* bytes, std::size_t nbytes, Header& out) noexcept {
  if (nbytes < kFixedNbytes) return fault(Reason::too_short, nbytes);
  if (std::memcmp(bytes, kMagic, sizeof kMagic) != 0) return fault(Reason::no_magic);
  const auto length = get<std::uint32_t>(bytes, 12);
  if (length % kPageNbytes != 0 || length < kPageNbytes || length > kMaxHeaderNbytes)
    return fault(Reason::header_length, length);
  if (length > nbytes) return fault(Reason::header_cut, length, nbytes);
  if (header_crc(bytes, length) != get<std::uint32_t>(bytes, kCrcAt)) return fault(Reason::header_crc);
  const auto version = get<std::uint16_t>(bytes, 8);
  if (version != kVersion) return fault(Reason::version, version);
  out.kind = get<std::uint16_t>(bytes, 10);
  out.header_nbytes = length;
  out.codec = get<std::uint16_t>(bytes, 20);
  const auto flags = get<std::uint16_t>(bytes, 22);
  if ((out.kind != kBlock && out.kind != kTombstone) || flags != 0) return fault(Reason::kind, out.kind, flags);
  out.nonce = bytes + 24;
  out.offset = get<std::uint64_t>(bytes, 40);
  out.put_seq = get<std::uint64_t>(bytes, 48);
  out.name_space = bytes + 56;
  out.key = bytes + 88;
  out.parent = bytes + 120;
  out.depth = get<std::uint32_t>(bytes, 152);
  out.epoch = get<std::uint32_t>(bytes, 156);
  out.sequence = bytes + 160;
  out.payload_nbytes = get<std::uint64_t>(bytes, 176);
  const auto raw_nbytes = get<std::uint64_t>(bytes, 184);
  out.created_unix_ns = get<std::uint64_t>(bytes, 192);
  out.parts = get<std::uint32_t>(bytes, 200);
  const auto entry_nbytes = get<std::uint32_t>(bytes, 204);
  out.table = bytes + kFixedNbytes;
  if (entry_nbytes != kPartEntryNbytes || out.parts < 1 || out.parts > kMaxParts ||
      length != header_nbytes_for(out.parts))
    return fault(Reason::parts, out.parts, entry_nbytes, length);
  if (out.offset % kPageNbytes != 0) return fault(Reason::unaligned, out.offset);
  if (const Fault found = check_table(out)) return found;
  std::uint64_t sum = 0;
  for (std::size_t number = 0; number < out.parts; ++number) sum += out.part(number).raw_nbytes;
  if (sum != raw_nbytes) return fault(Reason::raw_nbytes, sum, raw_nbytes);
  return {};
}

Fault check_header(const Header& header, const RecordShape& shape, const Identity& identity) noexcept {
  if (header.header_nbytes != shape.header_nbytes || header.payload_nbytes != shape.payload_nbytes)
    return fault(Reason::layout, header.payload_nbytes, header.parts);
  if (std::memcmp(header.nonce, identity.nonce.data(), sizeof(Id)) != 0)
    return fault_found(Reason::nonce, header.nonce, sizeof(Id));
  if (header.offset != identity.offset) return fault(Reason::misplaced, header.offset);
  if (header.kind != kBlock) return fault(Reason::no_block);
  if (std::memcmp(header.key, identity.key.data(), sizeof(Key)) != 0)
    return fault_found(Reason::key, header.key, sizeof(Key));
  if (std::memcmp(header.name_space, shape.name_space.data(), sizeof(Key)) != 0)
    return fault_found(Reason::name_space, header.name_space, sizeof(Key));
  if (header.epoch != shape.epoch) return fault(Reason::epoch, header.epoch);
  if (header.put_seq != identity.put_seq) return fault(Reason::put_seq, header.put_seq);
  return {};
}

Fault check_layout(const Header& header, const RecordShape& shape) noexcept {
  if (shape.part_nbytes.empty()) return {};
  if (header.codec != kRaw) return fault(Reason::codec, header.codec);
  if (header.parts != shape.part_nbytes.size()) return fault(Reason::layout, header.payload_nbytes, header.parts);
  for (std::size_t number = 0; number < header.parts; ++number) {
    const Part part = header.part(number);
    if (part.offset != shape.part_offset[number] || part.nbytes != shape.part_nbytes[number] ||
        part.raw_nbytes != shape.part_nbytes[number])
      return fault(Reason::part_layout, number, part.offset, part.nbytes, part.raw_nbytes);
  }
  return {};
}

Fault verify_parts(const Header& header, const std::uint8_t* payload, std::size_t nbytes, const PartRange& parts,
                   std::int64_t base) noexcept {
  const std::int64_t stop = parts.all ? header.parts : parts.stop;
  for (std::int64_t number = parts.all ? 0 : parts.start; number < stop; ++number) {
    if (number < 0 || number >= header.parts) return fault(Reason::no_part, number, header.parts);
    const Part part = header.part(static_cast<std::size_t>(number));
    const std::int64_t start = std::int64_t{part.offset} - base;
    if (start < 0 || static_cast<std::uint64_t>(start) + part.nbytes > nbytes)
      return fault(Reason::part_outside, number, part.offset, part.nbytes, nbytes, base);
    const std::uint32_t found = crc32c(payload + start, part.nbytes);
    if (found != part.crc32c) return fault(Reason::part_crc, number, found, part.crc32c);
  }
  return {};
}

void encode_header(const NewBlock& block, const RecordShape& shape, const std::uint32_t* crcs,
                   std::uint8_t* out) noexcept {
  std::memset(out, 0, shape.header_nbytes);
  std::memcpy(out, kMagic, sizeof kMagic);
  put<std::uint16_t>(out, 8, kVersion);
  put<std::uint16_t>(out, 10, kBlock);
  put<std::uint32_t>(out, 12, static_cast<std::uint32_t>(shape.header_nbytes));
  put<std::uint16_t>(out, 20, kRaw);
  put<std::uint64_t>(out, 48, block.put_seq);
  std::memcpy(out + 56, shape.name_space.data(), sizeof(Key));
  std::memcpy(out + 88, block.key.data(), sizeof(Key));
  std::memcpy(out + 120, block.parent.data(), sizeof(Key));
  put<std::uint32_t>(out, 152, block.depth);
  put<std::uint32_t>(out, 156, shape.epoch);
  std::memcpy(out + 160, block.sequence.data(), sizeof(Id));
  put<std::uint64_t>(out, 176, shape.payload_nbytes);
  put<std::uint64_t>(out, 184, shape.payload_nbytes);
  put<std::uint64_t>(out, 192, block.created_unix_ns);
  put<std::uint32_t>(out, 200, static_cast<std::uint32_t>(shape.part_nbytes.size()));
  put<std::uint32_t>(out, 204, kPartEntryNbytes);
  for (std::size_t number = 0; number < shape.part_nbytes.size(); ++number) {
    std::uint8_t* entry = out + kFixedNbytes + number * kPartEntryNbytes;
    put<std::uint32_t>(entry, 0, shape.part_offset[number]);
    put<std::uint32_t>(entry, 4, shape.part_nbytes[number]);
    put<std::uint32_t>(entry, 8, crcs[number]);
    put<std::uint32_t>(entry, 12, shape.part_nbytes[number]);
  }
  put<std::uint32_t>(out, kCrcAt, header_crc(out, shape.header_nbytes));
}

}  // namespace kvterrace::record
