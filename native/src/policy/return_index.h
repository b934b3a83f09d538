// The default policy: the return-index policy, and ARC where that has lately done better. Both are played; what is inside
// follows the leader.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "policy/gate_arc.h"
#include "policy/directory.h"
#include "policy/index_directory.h"

namespace kvterrace::policy {

class ReturnIndex final : public Directory {
 public:
  // `depth_worth`: as IndexDirectory.
  ReturnIndex(std::size_t capacity, std::uint64_t seed, double depth_worth = 0.0);

  void request(const Request& request) override;
  bool inside(Key key) const override;
  std::size_t size() const override { return leader().size() - missing_.size() + strays_.size(); }
  void resize(std::size_t capacity) override;
  void evict(std::size_t n) override;
  void forget(Key key) override;
  std::size_t nbytes() const override;
  // As IndexDirectory::hint; ARC takes none.
  void hint(Key key, Hint hint, double seconds, double now_s) { index_.hint(key, hint, seconds, now_s); }
  bool follows_arc() const { return arc_leads_; }

 private:
  const Directory& leader() const { return arc_leads_ ? static_cast<const Directory&>(arc_) : index_; }
  Directory& leader() { return arc_leads_ ? static_cast<Directory&>(arc_) : index_; }
  Directory& other() { return arc_leads_ ? static_cast<Directory&>(index_) : arc_; }
  void judge(const Request& request);
  void change_leader();
  std::size_t settle();
  bool evict_stray();

  double worth(std::size_t count) const;

  std::size_t capacity_;
  double depth_worth_;
  IndexDirectory index_;
  GateArc arc_;
  bool arc_leads_ = false;
  double ahead_ = 0.0;     // worth of the index's hits less that of ARC's, decayed
  double accesses_ = 0.0;  // worth of all that was asked for, decayed alike
  double blocks_ = 0.0;    // of it
  // After a change of the leader: blocks that are inside and not in its directory, in the order in which they will go (with
  // some that are no strays any more), and blocks of its directory that are not inside.
  std::unordered_set<Key> strays_;
  std::vector<Key> stray_order_;
  std::size_t next_stray_ = 0;
  std::unordered_set<Key> missing_;
};

}  // namespace kvterrace::policy
