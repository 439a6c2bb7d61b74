// SPDX-License-Identifier: Apache-2.0
// Pinned memory, in which the device may still be at work when a copy has returned. What a copy writes there is kept
// aside, and the place has a poison, NaN in any floating type, until the host waits for the copy: whoever reads before
// computes with that. What a copy reads is remembered, and compared when the host has waited: whoever writes before is
// found. An operation of torch that does either is told with its line, any other by the line of the copy.
//
// Not told: memory that is freed while a copy is at work, which CUDA's allocator of it keeps until then.

#include "pinned.h"

#include "races.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace simulated {

constexpr unsigned char kPoison = 0xFF;
constexpr int kLetters = 300;  // of the name of a line

// A copy that the host has not waited for.
struct Copy {
  Range range;
  std::string bytes;  // what it writes, or has read
  int stream;
  int64_t time;
  bool is_write, is_told;
  std::string place;
};

struct Pinned {
  size_t bytes = 0;
  History* history = nullptr;
};

static auto& lock = *new std::mutex();  // outlives what is freed at the process's end
static auto& blocks = *new std::map<uintptr_t, Pinned>();
static auto& copies = *new std::vector<Copy>();  // in their order
static std::atomic<size_t> num_copies{0};
static std::atomic<WherePlace> where{nullptr};

using Races = std::vector<std::string>;

static char* memory(Range range) { return reinterpret_cast<char*>(range.begin); }

static size_t size_of(Range range) { return range.end - range.begin; }

static bool overlap(Range one, Range other) { return one.begin < other.end && other.begin < one.end; }

static Range common(Range one, Range other) { return {std::max(one.begin, other.begin), std::min(one.end, other.end)}; }

static auto block_of(uintptr_t address) {
  auto block = blocks.upper_bound(address);
  if (block == blocks.begin()) return blocks.end();
  --block;
  return address < block->first + std::max<size_t>(block->second.bytes, 1) ? block : blocks.end();
}

static bool is_poison(const char* found, size_t size) {
  return found[0] == static_cast<char>(kPoison) && std::memcmp(found, found + 1, size - 1) == 0;
}

static std::string told(const std::string& who, bool is_write, const Copy& copy) {
  return who + (is_write ? " writes" : " reads") + " pinned memory that a copy may still be " +
         (copy.is_write ? "writing" : "reading") + ", begun at " + copy.place;
}

static const char* kept(const Copy& copy, Range part) { return copy.bytes.data() + (part.begin - copy.range.begin); }

// Whether the host has written where a copy is at work.
static void check(Copy& copy, Range part, Races& races) {
  const bool is_same = copy.is_write ? is_poison(memory(part), size_of(part))
                                     : std::memcmp(memory(part), kept(copy, part), size_of(part)) == 0;
  if (is_same || copy.is_told) return;
  copy.is_told = true;
  races.push_back(told("the host", true, copy));
}

static void arrive(Copy& copy, Range part, Races& races) {
  check(copy, part, races);
  std::memcpy(memory(part), kept(copy, part), size_of(part));
}

// Leaves of copies what lies beside a range.
static void forget(Range range) {
  std::vector<Copy> rest;
  for (auto& copy : copies) {
    if (!overlap(copy.range, range)) {
      rest.push_back(std::move(copy));
      continue;
    }
    for (Range part : {Range{copy.range.begin, range.begin}, Range{range.end, copy.range.end}}) {
      if (part.begin >= part.end) continue;
      rest.push_back(copy);
      rest.back().range = part;
      rest.back().bytes = copy.bytes.substr(part.begin - copy.range.begin, size_of(part));
    }
  }
  copies = std::move(rest);
  num_copies = copies.size();
}

static void tell(const Races& races) {  // without the lock
  for (const auto& race : races) tell_race(race);
}

// What copies write there arrives, and what they read is compared.
static void settle(Range range, Races& races) {
  for (auto& copy : copies) {
    if (copy.is_write && overlap(copy.range, range)) arrive(copy, common(copy.range, range), races);
  }
  for (auto& copy : copies) {
    if (!copy.is_write && overlap(copy.range, range)) check(copy, common(copy.range, range), races);
  }
}

bool is_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(lock);
  return block_of(reinterpret_cast<uintptr_t>(pointer)) != blocks.end();
}

void pin(const void* pointer, size_t bytes) {
  std::lock_guard<std::mutex> guard(lock);
  auto& block = blocks[reinterpret_cast<uintptr_t>(pointer)];  // all that have no bytes are one
  if (!block.history) block.history = history_on_host();
  block.bytes = bytes;
}

void unpin(const void* pointer) {
  Races races;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto block = blocks.find(reinterpret_cast<uintptr_t>(pointer));
    if (block == blocks.end()) return;
    const Range all{block->first, block->first + block->second.bytes};
    settle(all, races);
    forget(all);
    forget(block->second.history);
    blocks.erase(block);
  }
  tell(races);
}

void before_use(Range range) {
  if (!num_copies) return;
  Races races;
  {
    std::lock_guard<std::mutex> guard(lock);
    settle(range, races);
  }
  tell(races);
}

void after_use(Range range, int stream, bool is_write, bool goes_on, const std::string& by) {
  History* history = nullptr;
  int64_t offset = 0;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto block = block_of(range.begin);
    if (block == blocks.end()) return;
    history = block->second.history;
    offset = static_cast<int64_t>(range.begin - block->first);
  }
  const auto time = used(history, offset, offset + static_cast<int64_t>(size_of(range)), stream, is_write, by);
  char place[kLetters] = "";
  if (auto ask = goes_on ? where.load() : nullptr) ask(place, kLetters);
  std::lock_guard<std::mutex> guard(lock);
  if (is_write) forget(range);
  if (goes_on) {
    if (!is_write) {  // done before this one, with the same bytes
      std::erase_if(copies, [&](const Copy& copy) {
        return !copy.is_write && copy.stream == stream && range.begin <= copy.range.begin && copy.range.end <= range.end;
      });
    }
    copies.push_back({range, std::string(memory(range), size_of(range)), stream, time, is_write, false, place});
    num_copies = copies.size();
  }
  for (const auto& copy : copies) {
    if (!copy.is_write || !overlap(copy.range, range)) continue;
    const auto part = common(copy.range, range);
    std::memset(memory(part), kPoison, size_of(part));
  }
}

void deliver() {
  if (!num_copies) return;
  Races races;
  {
    std::lock_guard<std::mutex> guard(lock);
    const auto first_done = std::stable_partition(copies.begin(), copies.end(), [](const Copy& copy) {
      return !host_knows(copy.stream, copy.time);
    });
    for (auto copy = first_done; copy != copies.end(); ++copy) {
      if (copy->is_write) arrive(*copy, copy->range, races);
    }
    for (auto copy = first_done; copy != copies.end(); ++copy) {
      const auto is_poisoned = [&](const Copy& other) { return other.is_write && overlap(other.range, copy->range); };
      if (copy->is_write || std::any_of(copies.begin(), first_done, is_poisoned)) continue;  // found as a race already
      check(*copy, copy->range, races);
    }
    copies.erase(first_done, copies.end());
    num_copies = copies.size();
  }
  tell(races);
}

bool is_any_at_work() { return num_copies != 0; }

bool is_at_work(Range range) {
  std::lock_guard<std::mutex> guard(lock);
  return std::any_of(copies.begin(), copies.end(), [&](const Copy& copy) { return overlap(copy.range, range); });
}

void host_used(Range range, bool is_write, const std::string& by) {
  if (!num_copies) return;
  Races races;
  {
    std::lock_guard<std::mutex> guard(lock);
    for (auto& copy : copies) {
      if (!overlap(copy.range, range) || !(is_write || copy.is_write)) continue;
      copy.is_told = true;
      races.push_back(told(by, is_write, copy));
    }
  }
  tell(races);
}

}  // namespace simulated

extern "C" void simulated_on_copy(simulated::WherePlace asked) { simulated::where = asked; }
