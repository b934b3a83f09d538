#include <nanobind/nanobind.h>

#include "engine/bind.h"
#include "policy/bind.h"

namespace kvterrace {
#ifdef KVTERRACE_RECORD
void bind_record(nanobind::module_& m);  // record/bind.cpp
#endif
}  // namespace kvterrace

NB_MODULE(_native, m) {
  nanobind::set_leak_warnings(false);  // what a hung drive still has in its hands is kept on purpose
  kvterrace::bind_engine(m);
  kvterrace::bind_policy(m);
#ifdef KVTERRACE_RECORD
  kvterrace::bind_record(m);
#endif
}
