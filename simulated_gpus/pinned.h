// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace simulated {

using WherePlace = void (*)(char*, int);  // writes the line that runs now

// Pinned memory of the host: an address, and as many bytes.
struct Range {
  uintptr_t begin = 0, end = 0;
};

bool is_pinned(const void* pointer);
void pin(const void* pointer, size_t bytes);
void unpin(const void* pointer);

// An operation of the device is about to read or write pinned memory: there must lie what earlier ones of it wrote.
void before_use(Range range);
// It has, on a stream. If it goes on after the call, it is done when the host has waited for it.
void after_use(Range range, int stream, bool is_write, bool goes_on, const std::string& by);

// The host has waited: what a stream wrote to pinned memory arrives, as far as the host knows it done.
void deliver();

// Whether the device may still be at work in pinned memory, there or anywhere.
bool is_at_work(Range range);
bool is_any_at_work();

// The host reads or writes there.
void host_used(Range range, bool is_write, const std::string& by);

}  // namespace simulated
