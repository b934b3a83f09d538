#pragma once

#include <nanobind/nanobind.h>

namespace kvterrace {

void bind_policy(nanobind::module_& m);

namespace policy {
void bind_references(nanobind::module_& m);    // bind_references.cpp
void bind_return_index(nanobind::module_& m);  // bind_return_index.cpp
void bind_key_map(nanobind::module_& m);       // bind_key_map.cpp
}  // namespace policy

}  // namespace kvterrace
