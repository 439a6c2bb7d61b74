// SPDX-License-Identifier: Apache-2.0
// Races of streams. Everything runs at once and in order here, but each stream has the clock of what a GPU would have
// done before its next operation: an event carries it to another stream, a wait of the host to all that is begun after.
// So what reads or writes bytes that another stream may not have finished with is found, whatever a GPU would have done
// (vector clocks: Mattern 1989; Flanagan and Freund 2009, doi 10.1145/1542476.1542490, use them as here).

#include "races.h"

#include "pinned.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <vector>

namespace simulated {

constexpr size_t kRemembered = 256;  // accesses of one block of memory

using Clock = std::array<int64_t, kStreams>;  // by stream: the operations of it that are done

struct Event {
  Clock clock;
};

struct Access {
  int64_t begin, end;  // bytes
  int stream;
  int64_t time;
  bool is_write;
  std::string by;
};

// What is freed goes to the next who allocates on the stream of its allocation, at once: CUDA's allocator waits for no
// other stream, unless it was told of it (record_stream). By stream, the last use that was not waited for.
struct Left {
  int64_t time = 0;
  std::string by;
};
using Remains = std::array<Left, kStreams>;

struct History {
  int stream;
  std::array<bool, kStreams> is_recorded{};
  std::vector<Access> accesses;
  Remains remains;  // of what may have lain there before
};

static auto& lock = *new std::mutex();  // outlives what is freed at the process's end
static auto& clocks = *new std::array<Clock, kStreams>();
static auto& remains_on = *new std::array<Remains, kStreams>();
static Clock of_host{};
static std::atomic<OnRace> on_race{nullptr};

static void join(Clock& clock, const Clock& other) {
  for (int i = 0; i < kStreams; i++) clock[i] = std::max(clock[i], other[i]);
}

// What an operation that is begun now on this stream comes after.
static Clock& now(int stream) {
  join(clocks[stream], of_host);
  return clocks[stream];
}

static void host_comes_after(const Clock& clock) {
  {
    std::lock_guard<std::mutex> guard(lock);
    join(of_host, clock);
  }
  deliver();
}

void tell_race(const std::string& race) {  // without the lock: Python's own may be awaited by who holds this one
  auto told = on_race.load();
  if (told && !race.empty()) told(race.c_str());
}

Event* record(Event* event, int stream) {
  std::lock_guard<std::mutex> guard(lock);
  if (!event) event = new Event();
  event->clock = now(stream);
  return event;
}
void forget(Event* event) { delete event; }
void wait_for(const Event* event, int stream) {
  std::lock_guard<std::mutex> guard(lock);
  if (event) join(clocks[stream], event->clock);
}
void host_waits_for(const Event* event) {
  if (event) host_comes_after(event->clock);
}
void host_waits_for_stream(int stream) { host_comes_after(clocks[stream]); }
void host_waits_for_all() {
  Clock all{};
  {
    std::lock_guard<std::mutex> guard(lock);
    for (const auto& clock : clocks) join(all, clock);
  }
  host_comes_after(all);
}
bool host_knows(int stream, int64_t time) {
  std::lock_guard<std::mutex> guard(lock);
  return time <= of_host[stream];
}

History* allocated(int stream) {
  std::lock_guard<std::mutex> guard(lock);
  return new History{stream, {}, {}, remains_on[stream]};
}

void recorded(History* history, int stream) {
  std::lock_guard<std::mutex> guard(lock);
  history->is_recorded[stream] = true;
}

History* history_on_host() { return new History(); }
void forget(History* history) { delete history; }

void freed(History* history) {
  {
    std::lock_guard<std::mutex> guard(lock);
    const auto& clock = now(history->stream);
    auto& remains = remains_on[history->stream];
    for (const auto& access : history->accesses) {
      auto& left = remains[access.stream];
      if (history->is_recorded[access.stream] || access.time <= std::max(left.time, clock[access.stream])) continue;
      left = {access.time, access.by};
    }
  }
  delete history;
}

int64_t used(History* history, int64_t begin, int64_t end, int stream, bool is_write, const std::string& by) {
  std::string race;
  int64_t time = 0;
  {
    std::lock_guard<std::mutex> guard(lock);
    auto& clock = now(stream);
    auto& accesses = history->accesses;
    time = ++clock[stream];
    for (const auto& access : accesses) {
      if (access.end <= begin || end <= access.begin || !(is_write || access.is_write)) continue;
      if (access.time <= clock[access.stream]) continue;
      race = by + (is_write ? " writes what " : " reads what ") + access.by + (access.is_write ? " wrote" : " read") +
             " on another stream, without waiting for it";
    }
    for (int i = 0; i < kStreams; i++) {
      auto& left = history->remains[i];
      if (left.time > clock[i]) race = by + " uses memory that was freed while " + left.by + " on another stream used it";
      left.time = 0;
    }
    accesses.erase(std::remove_if(accesses.begin(), accesses.end(),
                                  [&](const Access& access) {
                                    return begin <= access.begin && access.end <= end &&
                                           (is_write || !access.is_write) &&
                                           access.time <= clock[access.stream];
                                  }),
                   accesses.end());
    if (accesses.size() == kRemembered) accesses.erase(accesses.begin());
    accesses.push_back({begin, end, stream, clock[stream], is_write, by});
  }
  tell_race(race);
  return time;
}

std::pair<int64_t, int64_t> progress(int stream) {
  std::lock_guard<std::mutex> guard(lock);
  return {clocks[0][0], now(stream)[0]};
}

}  // namespace simulated

extern "C" void simulated_on_race(simulated::OnRace told) { simulated::on_race = told; }
