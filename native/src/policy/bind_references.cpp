#include "policy/bind.h"

namespace kvterrace::policy {

void bind_references(nanobind::module_&) {}

}  // namespace kvterrace::policy
