#include "policy/bind.h"

namespace kvterrace::policy {

void bind_return_index(nanobind::module_&) {}

}  // namespace kvterrace::policy
