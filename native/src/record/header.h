// A record's header, as docs/design.md has it. Pure functions over bytes that answer with values, whatever the bytes. The
// same refusals in the same order as `kvterrace.format.record`, which also has the words for them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvterrace::record {

using Key = std::array<std::uint8_t, 32>;
using Id = std::array<std::uint8_t, 16>;

constexpr std::size_t kPageNbytes = 4096;
constexpr std::size_t kFixedNbytes = 208;
constexpr std::size_t kPartEntryNbytes = 16;
constexpr std::size_t kMaxParts = 4096;

// Why a record is not served. Numbers are those of `kvterrace.format.passes.Reason`; in brackets what `numbers` holds.
enum class Reason : std::uint8_t {
  none = 0,
  too_short = 1,        // [bytes at hand]
  no_magic = 2,
  header_length = 3,    // [header_nbytes]
  header_cut = 4,       // [header_nbytes, bytes at hand]
  header_crc = 5,
  version = 6,          // [version]
  kind = 7,             // [kind, flags]
  parts = 8,            // [parts, part_entry_nbytes, header_nbytes]
  unaligned = 9,        // [offset]
  payload = 10,         // [parts, payload_nbytes]
  table = 11,           // [payload_nbytes]
  tombstone = 12,       // [parts, payload_nbytes]
  raw_nbytes = 13,      // [sum over the parts, raw_nbytes]
  layout = 14,          // [payload_nbytes, parts]
  nonce = 15,           // stale; found
  misplaced = 16,       // [offset]
  no_block = 17,        // stale
  key = 18,             // stale; found
  name_space = 19,      // stale; found
  epoch = 20,           // stale [epoch]
  put_seq = 21,         // stale [put_seq]
  codec = 22,           // [codec]
  part_layout = 23,     // [number, offset, nbytes, raw_nbytes]
  no_part = 24,         // [number (signed), parts]
  part_outside = 25,    // [number, offset, nbytes, bytes read, base]
  part_crc = 26,        // [number, CRC found, CRC expected]
};

struct Fault {
  Reason reason = Reason::none;
  std::array<std::uint64_t, 5> numbers{};
  Key found{};  // a nonce takes its first half

  explicit operator bool() const noexcept { return reason != Reason::none; }
};

struct Part {
  std::uint32_t offset, nbytes, crc32c, raw_nbytes;
};

// What a header says. Points into the bytes it was decoded from.
struct Header {
  std::uint16_t kind, codec;
  std::uint32_t header_nbytes, depth, epoch, parts;
  std::uint64_t offset, put_seq, payload_nbytes, created_unix_ns;
  const std::uint8_t *nonce, *name_space, *key, *parent, *sequence, *table;

  Part part(std::size_t number) const noexcept;
};

// What all records of a namespace have in common. `part_nbytes` is empty where the layout is not known.
struct RecordShape {
  Key name_space;
  std::uint32_t epoch;
  std::size_t header_nbytes, payload_nbytes;
  std::vector<std::uint32_t> part_nbytes, part_offset;

  std::size_t record_nbytes() const noexcept;
};

// What a record must turn out to be, beyond its shape.
struct Identity {
  Key key;
  std::uint64_t put_seq;
  Id nonce;
  std::uint64_t offset;
};

// Which parts to look at; all of them, or `start` to `stop`.
struct PartRange {
  bool all = true;
  std::int64_t start = 0, stop = 0;
};

constexpr std::size_t pad_to_page(std::size_t nbytes) noexcept {
  return (nbytes + kPageNbytes - 1) / kPageNbytes * kPageNbytes;
}

constexpr std::size_t header_nbytes_for(std::size_t parts) noexcept {
  return pad_to_page(kFixedNbytes + parts * kPartEntryNbytes);
}

// Decodes the header at the front of `nbytes` bytes into `out`, which is only meaningful if there is no fault.
Fault decode_header(const std::uint8_t* bytes, std::size_t nbytes, Header& out) noexcept;

// Whether a decoded header is of this shape, and the block that the index means.
Fault check_header(const Header& header, const RecordShape& shape, const Identity& identity) noexcept;

// Whether the parts lie where this layout has them, in a codec that this build knows: what is copied out by layout was
// verified by table, so the two must agree. No fault where the layout is not known.
Fault check_layout(const Header& header, const RecordShape& shape) noexcept;

// Checks the CRCs of parts. `payload` has the payload's bytes from its offset `base` on.
Fault verify_parts(const Header& header, const std::uint8_t* payload, std::size_t nbytes, const PartRange& parts,
                   std::int64_t base) noexcept;

// What a put knows of its block.
struct NewBlock {
  Key key, parent;
  Id sequence;
  std::uint64_t put_seq, created_unix_ns;
  std::uint32_t depth;
};

// Writes the header of a raw block, all `shape.header_nbytes` bytes of it; nonce and offset zero until it has its place.
// `crcs`: one for each part of `shape`.
void encode_header(const NewBlock& block, const RecordShape& shape, const std::uint32_t* crcs,
                   std::uint8_t* out) noexcept;

}  // namespace kvterrace::record
