#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "crc32c.h"

namespace kvterrace::record {
namespace {

// Sums of less than this hold the GIL: to let go of it and take it back costs as much.
constexpr std::size_t kReleaseNbytes = 16 << 10;

template <class Sum>
std::uint32_t sum_of(nb::handle data, Sum sum) {
  const Loan loan(data, PyBUF_SIMPLE);
  const Memory memory = loan.memory();
  if (memory.nbytes < kReleaseNbytes) return sum(memory);
  nb::gil_scoped_release release;
  return sum(memory);
}

template <class Sum>
std::uint32_t copy_of(nb::handle dst, nb::handle src, Sum sum) {
  const Loan to(dst, PyBUF_WRITABLE), from(src, PyBUF_SIMPLE);
  const Memory target = to.memory(), source = from.memory();
  if (target.nbytes != source.nbytes)
    refuse("a copy of " + std::to_string(source.nbytes) + " B does not fill " + std::to_string(target.nbytes) + " B");
  nb::gil_scoped_release release;
  return sum(target, source);
}

// Clears `writable` where an array is read-only.
std::vector<Piece> pieces_of(const nb::list& arrays, bool& writable) {
  std::vector<Piece> pieces;
  pieces.reserve(arrays.size());
  for (nb::handle array : arrays) {
    Piece& piece = pieces.emplace_back();
    const nb::object data = array.attr("__array_interface__")["data"];
    piece.address = reinterpret_cast<std::uint8_t*>(nb::cast<std::uintptr_t>(data[0]));
    if (nb::cast<bool>(data[1])) writable = false;
    piece.shape = nb::cast<std::vector<std::int64_t>>(array.attr("shape"));
    piece.strides = nb::cast<std::vector<std::int64_t>>(array.attr("strides"));
    piece.item_nbytes = nb::cast<std::size_t>(array.attr("itemsize"));
  }
  return pieces;
}

// Where a part lies in a payload whose parts lie end to end.
std::vector<std::uint32_t> offsets_of(const std::vector<std::uint32_t>& part_nbytes, std::size_t payload_nbytes) {
  std::vector<std::uint32_t> offsets;
  offsets.reserve(part_nbytes.size());
  std::size_t at = 0;
  for (const std::uint32_t nbytes : part_nbytes) {
    offsets.push_back(static_cast<std::uint32_t>(at));
    at += nbytes;
  }
  if (at != payload_nbytes)
    refuse("parts of " + std::to_string(at) + " B in a payload of " + std::to_string(payload_nbytes) + " B");
  return offsets;
}

std::size_t checked(const Claims& claims, std::size_t at) {
  if (at >= claims.size()) throw nb::index_error(("no block " + std::to_string(at)).c_str());
  return at;
}

}  // namespace

void bind_sums(nb::module_& module) {
  module.def(
      "crc32c",
      [](nb::handle data, std::uint32_t value) {
        return sum_of(data, [value](Memory all) { return crc32c(all.address, all.nbytes, value); });
      },
      nb::arg("data"), nb::arg("value") = 0,
      "CRC32C of `data` (C-contiguous), carried on from `value`. Lets go of the GIL for 16 KiB and more.");
  module.def(
      "crc32c_software",
      [](nb::handle data, std::uint32_t value) {
        return sum_of(data, [value](Memory all) { return crc32c_software(all.address, all.nbytes, value); });
      },
      nb::arg("data"), nb::arg("value") = 0, "As `crc32c`, without the CPU's instruction.");
  module.def("crc32c_combine", &crc32c_combine, nb::arg("crc_a"), nb::arg("crc_b"), nb::arg("nbytes_b"),
             "CRC32C of a, then b, from those of both and the length of b.");
  module.def("crc32c_kernel", &crc32c_kernel, "What `crc32c` runs on: sse4.2, armv8 or software.");
  module.def(
      "copy_crc32c",
      [](nb::handle dst, nb::handle src, std::uint32_t value) {
        return copy_of(dst, src, [value](Memory to, Memory from) {
          return copy_crc32c(to.address, from.address, from.nbytes, value);
        });
      },
      nb::arg("dst"), nb::arg("src"), nb::arg("value") = 0,
      "Copy `src` to `dst` (of one size, apart) and return the CRC32C of what is there then, in one pass.");
  module.def(
      "stream_crc32c",
      [](nb::handle dst, nb::handle src, std::uint32_t value) {
        return copy_of(dst, src, [value](Memory to, Memory from) {
          const std::uint32_t sum = stream_crc32c(to.address, from.address, from.nbytes, value);
          end_streams();
          return sum;
        });
      },
      nb::arg("dst"), nb::arg("src"), nb::arg("value") = 0, "As `copy_crc32c`, past the cache.");
}

void bind_places(nb::module_& module) {
  nb::class_<Claims>(module, "Claims", "Who may touch the caller's memory of each block of a transfer. Any thread.")
      .def(nb::init<std::size_t>(), nb::arg("blocks"))
      .def("__len__", &Claims::size)
      .def(
          "begin_copy", [](Claims& self, std::size_t at) { return self.begin_copy(checked(self, at)); }, nb::arg("at"),
          "Claim a block's memory for copying; False if somebody did, or the block is settled.")
      .def(
          "end_copy",
          [](Claims& self, std::size_t at) {
            if (!self.end_copy(checked(self, at)))
              throw std::runtime_error("no copy of block " + std::to_string(at) + " is under way");
          },
          nb::arg("at"), "The copy has ended. Raises RuntimeError if none was under way: a bug.")
      .def(
          "abandon_copy",
          [](Claims& self, std::size_t at) {
            if (!self.abandon_copy(checked(self, at)))
              throw std::runtime_error("no copy of block " + std::to_string(at) + " is under way");
          },
          nb::arg("at"), "The copy came to nothing: the block is open again. Raises RuntimeError as `end_copy`.")
      .def(
          "settle",
          [](Claims& self, std::size_t at) {
            const Claims::Settled settled = self.settle(checked(self, at));
            if (settled == Claims::Settled::refused)
              throw std::runtime_error("block " + std::to_string(at) + " cannot be settled while it is copied");
            return settled == Claims::Settled::first;
          },
          nb::arg("at"),
          "Settle a block; False if it was settled before. Raises RuntimeError while it is being copied: a bug.")
      .def("give_up", &Claims::give_up, "Settle each block that nobody began to copy; returns these.")
      .def(
          "is_open", [](const Claims& self, std::size_t at) { return self.is_open(checked(self, at)); }, nb::arg("at"),
          "Whether the block is not settled.");

  nb::class_<RecordShape>(module, "RecordShape", "What all records of a namespace have in common.")
      .def(
          "__init__",
          [](RecordShape* self, const nb::bytes& name_space, std::uint32_t epoch, std::size_t header_nbytes,
             std::uint32_t payload_nbytes, std::vector<std::uint32_t> part_nbytes) {
            RecordShape made{fixed<32>(name_space, "namespace"), epoch, header_nbytes, payload_nbytes, {}, {}};
            if (header_nbytes < kPageNbytes || header_nbytes % kPageNbytes != 0 ||
                header_nbytes > header_nbytes_for(kMaxParts) || part_nbytes.size() > kMaxParts ||
                (!part_nbytes.empty() && header_nbytes_for(part_nbytes.size()) != header_nbytes))
              refuse("no header of " + std::to_string(header_nbytes) + " B has " + std::to_string(part_nbytes.size()) +
                     " parts");
            if (!part_nbytes.empty()) made.part_offset = offsets_of(part_nbytes, payload_nbytes);
            made.part_nbytes = std::move(part_nbytes);
            new (self) RecordShape(std::move(made));
          },
          nb::arg("namespace"), nb::arg("epoch"), nb::arg("header_nbytes"), nb::arg("payload_nbytes"),
          nb::arg("part_nbytes"), "`part_nbytes`: empty where the layout is not known; such records can only be promoted.");

  nb::class_<OwnedPlaces>(module, "Places", "A caller's memory, part by part.")
      .def(
          "__init__",
          [](OwnedPlaces* self, const nb::list& arrays, std::vector<std::uint32_t> part_nbytes, std::size_t first_part,
             const nb::object& owner, std::vector<std::int64_t> rows) {
            try {
              bool writable = true;
              Places places(pieces_of(arrays, writable), std::move(part_nbytes), first_part, std::move(rows));
              new (self) OwnedPlaces{std::move(places), writable, nb::tuple(arrays), owner};
            } catch (const std::invalid_argument& error) {
              refuse(error.what());
            }
          },
          nb::arg("arrays"), nb::arg("part_nbytes"), nb::arg("first_part") = 0,
          nb::arg("owner") = nb::none(), nb::arg("rows") = std::vector<std::int64_t>{},
          "NumPy arrays whose first axis counts blocks: one for each part, or one of all, along its second axis or as plain "
          "bytes. With `rows`, it counts the rows of a pool, and block `b` lies in row `rows[b]`. The arrays are kept alive, "
          "and so is `owner`: what else their memory belongs to.")
      .def(
          "release", [](OwnedPlaces& self) { self.arrays = nb::tuple(), self.owner = nb::none(); },
          "Let go of the arrays and of `owner`. Only when every claim on the blocks is settled: nobody looks at them then.");
}

}  // namespace kvterrace::record

void kvterrace::bind_record(nanobind::module_& module) {
  record::bind_sums(module);
  record::bind_places(module);
  record::bind_hooks(module);
}
