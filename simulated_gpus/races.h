// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <utility>

namespace simulated {

constexpr int kStreams = 33;  // the default one, and as many as CUDA's streams are drawn from by turn

struct Event;    // of a stream
struct History;  // of a block of memory
using OnRace = void (*)(const char*);

Event* record(Event* event, int stream);  // a new one for null
void forget(Event* event);
void wait_for(const Event* event, int stream);  // null: nothing to wait for
void host_waits_for(const Event* event);
void host_waits_for_stream(int stream);
void host_waits_for_all();

History* allocated(int stream);
void recorded(History* history, int stream);  // freed later, when that stream is done with it
void freed(History* history);
History* history_on_host();  // of pinned memory, which what is freed does not pass on
void forget(History* history);
// Returns the time of the use on its stream.
int64_t used(History* history, int64_t begin, int64_t end, int stream, bool is_write, const std::string& by);

// Whether the host has waited for what a stream did at a time.
bool host_knows(int stream, int64_t time);

void tell_race(const std::string& race);

// How often the default stream has used memory, and how many of these uses must be over before what begins on a stream.
std::pair<int64_t, int64_t> progress(int stream);

}  // namespace simulated
