// What runs on the thread that completed an operation: verify and scatter, scatter, gather and sum.
//
// Items (`Landing`, `Copy`, `Fill`) carry the answers; they are read after the operation's result was posted. They, and the
// memory that they point into, must outlive the hook: the bindings see to that.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../hook.h"
#include "claims.h"
#include "header.h"
#include "places.h"

namespace kvterrace::record {

// Some bytes of a slot or of staging.
struct Memory {
  std::uint8_t* address = nullptr;
  std::size_t nbytes = 0;
};

// One block of a caller's memory, and its number among the transfer's claims.
struct Target {
  const Places* places = nullptr;  // none: the block is only promoted
  std::size_t block = 0;
  Claims* claims = nullptr;
  std::size_t claim = 0;
};

// Numbers are those of `kvterrace.format.passes.Landed`.
enum class Landed : std::uint8_t { unseen = 0, right = 1, missing = 2, bad = 3, stale = 4 };

// A record on its way into memory - its header, then its payload from offset `base` on - and what it must turn out to be.
// With `runs` only the header lands in `memory`, and the whole payload in those, which are the caller's own: nothing is
// left to copy, and whoever submitted the read holds the claim.
struct Landing {
  Memory memory;
  const RecordShape* shape;
  Identity identity;
  PartRange parts;
  std::int64_t base;
  Target target;

  Landed landed = Landed::unseen;
  bool copied = false;  // the caller's memory was written: right, and the claim was won
  Fault fault;
  std::vector<Memory> runs = {};

  std::size_t nbytes() const noexcept;  // of all that the read brings
};

// A block on its way from a slot to the caller.
struct Copy {
  Memory slot;
  const RecordShape* shape;
  Target target;

  bool copied = false;
};

// A block on its way from the caller into a slot, which then holds its record, without a place.
struct Fill {
  Memory slot;
  const RecordShape* shape;
  NewBlock block;
  Target target;

  bool done = false;  // else the claim was lost, and the slot is as it was
};

// After one read into the landings' memories, one after the other. Each that arrived whole is verified; of these, each that
// is right is scattered, if its target can still be claimed.
class ReadHook : public Hook {
 public:
  explicit ReadHook(std::vector<Landing*> landings) noexcept;
  void run(const Completion& completion) noexcept override;

 private:
  std::vector<Landing*> landings_;
};

// The same for bytes that are known to be in memory, whatever the completion says.
class VerifyHook : public Hook {
 public:
  explicit VerifyHook(std::vector<Landing*> landings) noexcept;
  void run(const Completion& completion) noexcept override;

 private:
  std::vector<Landing*> landings_;
};

class CopyHook : public Hook {
 public:
  explicit CopyHook(std::vector<Copy*> copies) noexcept;
  void run(const Completion& completion) noexcept override;

 private:
  std::vector<Copy*> copies_;
};

class FillHook : public Hook {
 public:
  explicit FillHook(std::vector<Fill*> fills);
  void run(const Completion& completion) noexcept override;

 private:
  std::vector<Fill*> fills_;
  std::vector<std::uint32_t> crcs_;  // of the parts of one block at a time
};

}  // namespace kvterrace::record
