// CRC32C (Castagnoli: polynomial 0x1EDC6F41, reflected, as in RFC 3720), the only checksum on disk. Any thread.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvterrace::record {

// Of `nbytes` bytes, carried on from `value`: crc32c(b, crc32c(a)) is that of a, then b.
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// The same without the CPU's instruction.
std::uint32_t crc32c_software(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// Of a, then b, from the sums of both and the length of b.
std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t nbytes_b) noexcept;

// What `crc32c` runs on: "sse4.2", "armv8" or "software". Found out when it is first used.
const char* crc32c_kernel() noexcept;

// Copies `nbytes` bytes and returns the CRC32C of what is in `dst` then, carried on from `value`. The sum is taken of what
// was written, so it is right for the copy even where another thread writes to `src` meanwhile. They do not overlap.
std::uint32_t copy_crc32c(void* dst, const void* src, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// The same past the cache, for what is too large to be found there later. `end_streams` before anybody is told.
std::uint32_t stream_crc32c(void* dst, const void* src, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// memcpy past the cache, likewise.
void stream_copy(void* dst, const void* src, std::size_t nbytes) noexcept;

// Orders what this thread streamed before what it stores next.
void end_streams() noexcept;

}  // namespace kvterrace::record
