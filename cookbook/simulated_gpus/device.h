#pragma once

#include <ATen/ATen.h>

#include <string>

namespace simulated {

using OnWait = void (*)(const char*);

// The host would have waited for the GPU.
void waited(const std::string& why);

// An operation ran on the device.
void called(const std::string& name);

}  // namespace simulated
