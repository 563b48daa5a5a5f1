// Blocks in use by their addresses: a hash table whose entries need no memory of their own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "blocks.h"

namespace memplug {

template <typename Block>
class BlockTable {
 public:
  // Adds a block; none begins at this address yet.
  void add(char* begin, const Block& block) {
    if (free_ < 0 && nodes_.size() == chains_.size()) {
      grow();
    }
    int32_t& chain = chains_[chain_of(begin)];
    if (free_ < 0) {
      nodes_.push_back({begin, chain, block});
      chain = static_cast<int32_t>(nodes_.size()) - 1;
    } else {
      const int32_t at = free_;
      free_ = nodes_[at].next;
      nodes_[at] = {begin, chain, block};
      chain = at;
    }
    ++count_;
  }

  // Returns the block that begins at this address, until the next change of the table; null: there is none.
  Block* find(char* begin) {
    const int32_t at = *link_to(begin);
    return at < 0 ? nullptr : &nodes_[at].block;
  }

  // Removes the block that begins at this address.
  void remove(char* begin) {
    int32_t* const link = link_to(begin);
    const int32_t at = *link;
    *link = nodes_[at].next;
    nodes_[at].begin = nullptr;
    nodes_[at].next = free_;
    free_ = at;
    if (--count_ == 0) {
      nodes_.clear();
      free_ = -1;
    }
  }

  // Calls `visit` with the address and the block of each, in any order; it must not change the table.
  template <typename Visit>
  void for_each(Visit visit) {
    for (Node& node : nodes_) {
      if (node.begin != nullptr) {
        visit(node.begin, node.block);
      }
    }
  }
  template <typename Visit>
  void for_each(Visit visit) const {
    for (const Node& node : nodes_) {
      if (node.begin != nullptr) {
        visit(node.begin, node.block);
      }
    }
  }

 private:
  struct Node {
    char* begin; // null: unused
    int32_t next; // index of the next node of the chain, or of the next unused node; -1: the last
    Block block;
  };

  size_t chain_of(const char* begin) const {
    const auto number = static_cast<uint64_t>(reinterpret_cast<uintptr_t>(begin) / BLOCK_BYTES);
    return number * 0x9E3779B97F4A7C15ull >> 32 & (chains_.size() - 1);
  }

  // Returns the link to the node of this address, or the link at the end of its chain.
  int32_t* link_to(const char* begin) {
    int32_t* link = &chains_[chain_of(begin)];
    while (*link >= 0 && nodes_[*link].begin != begin) {
      link = &nodes_[*link].next;
    }
    return link;
  }

  void grow() { // no node is unused
    chains_.assign(2 * chains_.size(), -1);
    for (size_t at = 0; at < nodes_.size(); ++at) {
      int32_t& chain = chains_[chain_of(nodes_[at].begin)];
      nodes_[at].next = chain;
      chain = static_cast<int32_t>(at);
    }
  }

  std::vector<int32_t> chains_ = std::vector<int32_t>(16, -1); // index of the first node; -1: none
  std::vector<Node> nodes_;
  int32_t free_ = -1; // the first unused node; -1: none
  size_t count_ = 0; // of blocks
};

} // namespace memplug
