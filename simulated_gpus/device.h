// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <string>
#include <utility>

namespace simulated {

using OnWait = void (*)(const char*);

// The host would have waited for the GPU.
void waited(const std::string& why);

// An operation on the current stream read or wrote the tensor.
void used(const at::Tensor& tensor, bool is_write, const std::string& by);

// Of the current stream, see races.h.
std::pair<int64_t, int64_t> progress();

// An operation ran on the device.
void called(const std::string& name);

}  // namespace simulated
