#pragma once

#include <nanobind/nanobind.h>

namespace kvterrace {
void bind_engine(nanobind::module_& m);
}
