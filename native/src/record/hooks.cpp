#include "hooks.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"

namespace kvterrace::record {
namespace {

// Copies the target's parts out of `payload`, which begins at the payload's offset `base`, unless the block is settled.
bool scatter(const Target& target, const RecordShape& shape, const std::uint8_t* payload, std::int64_t base) noexcept {
  if (target.places == nullptr || !target.claims->begin_copy(target.claim)) return false;
  const std::int64_t first = shape.part_offset[target.places->first_part()];
  target.places->scatter(target.block, payload + (first - base));
  target.claims->end_copy(target.claim);
  return true;
}

bool is_stale(Reason reason) noexcept {
  switch (reason) {
    case Reason::nonce:
    case Reason::no_block:
    case Reason::key:
    case Reason::name_space:
    case Reason::epoch:
    case Reason::put_seq: return true;
    default: return false;
  }
}

// The parts lie end to end over the runs: `check_layout` has seen to the former, whoever made the landing to the latter.
Fault verify_runs(const Header& header, const std::vector<Memory>& runs) noexcept {
  std::size_t run = 0, at = 0;
  for (std::size_t number = 0; number < header.parts; ++number) {
    const Part part = header.part(number);
    std::uint32_t found = 0;
    for (std::size_t left = part.nbytes; left > 0;) {
      if (at == runs[run].nbytes) ++run, at = 0;
      const std::size_t some = std::min(left, runs[run].nbytes - at);
      found = crc32c(runs[run].address + at, some, found);
      at += some;
      left -= some;
    }
    if (found != part.crc32c) return Fault{Reason::part_crc, {number, found, part.crc32c}, {}};
  }
  return {};
}

Fault verify_all(const Landing& one, const std::uint8_t* payload, std::size_t nbytes) noexcept {
  Header header;
  if (const Fault fault = decode_header(one.memory.address, one.memory.nbytes, header)) return fault;
  if (const Fault fault = check_header(header, *one.shape, one.identity)) return fault;
  if (const Fault fault = check_layout(header, *one.shape)) return fault;
  if (!one.runs.empty()) return verify_runs(header, one.runs);
  return verify_parts(header, payload, nbytes, one.parts, one.base);
}

// The caller's memory is not touched before all that is wanted was found right - only then is anything scattered - unless
// the caller has lent it to the read itself.
void land(Landing& one) noexcept {
  const std::size_t header_nbytes = std::min(one.shape->header_nbytes, one.memory.nbytes);
  const std::uint8_t* payload = one.memory.address + header_nbytes;
  one.fault = verify_all(one, payload, one.memory.nbytes - header_nbytes);
  if (one.fault) {
    one.landed = is_stale(one.fault.reason) ? Landed::stale : Landed::bad;
    return;
  }
  one.copied = !one.runs.empty() || scatter(one.target, *one.shape, payload, one.base);
  one.landed = Landed::right;
}

void forget(const std::vector<Landing*>& landings) noexcept {
  for (Landing* one : landings) one->landed = Landed::unseen, one->copied = false, one->fault = Fault{};
}

}  // namespace

std::size_t Landing::nbytes() const noexcept {
  std::size_t sum = memory.nbytes;
  for (const Memory& run : runs) sum += run.nbytes;
  return sum;
}

// A landing that is read again, by itself, starts without the last verdict.
ReadHook::ReadHook(std::vector<Landing*> landings) noexcept : landings_(std::move(landings)) { forget(landings_); }

void ReadHook::run(const Completion& completion) noexcept {
  std::int64_t end = 0;
  for (Landing* one : landings_) {
    end += static_cast<std::int64_t>(one->nbytes());
    if (completion.error != 0 || end > completion.nbytes)
      one->landed = Landed::missing;
    else
      land(*one);
  }
}

VerifyHook::VerifyHook(std::vector<Landing*> landings) noexcept : landings_(std::move(landings)) { forget(landings_); }

void VerifyHook::run(const Completion&) noexcept {
  for (Landing* one : landings_) land(*one);
}

CopyHook::CopyHook(std::vector<Copy*> copies) noexcept : copies_(std::move(copies)) {}

void CopyHook::run(const Completion&) noexcept {
  for (Copy* one : copies_) one->copied = scatter(one->target, *one->shape, one->slot.address + one->shape->header_nbytes, 0);
}

FillHook::FillHook(std::vector<Fill*> fills) : fills_(std::move(fills)) {
  std::size_t parts = 0;
  for (const Fill* one : fills_) parts = std::max(parts, one->shape->part_nbytes.size());
  crcs_.resize(parts);
}

void FillHook::run(const Completion&) noexcept {
  for (Fill* one : fills_) {
    const Target& target = one->target;
    if (!target.claims->begin_copy(target.claim)) continue;
    const RecordShape& shape = *one->shape;
    std::uint8_t* payload = one->slot.address + shape.header_nbytes;
    for (std::size_t part = 0; part < shape.part_nbytes.size(); ++part)
      crcs_[part] = target.places->gather(target.block, part, payload + shape.part_offset[part]);
    target.claims->end_copy(target.claim);
    std::memset(payload + shape.payload_nbytes, 0, one->slot.nbytes - shape.header_nbytes - shape.payload_nbytes);
    encode_header(one->block, shape, crcs_.data(), one->slot.address);
    one->done = true;
  }
}

}  // namespace kvterrace::record
