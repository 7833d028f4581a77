// The names of the ops, and their registration.
#pragma once

namespace anyflash::tensorflow {

struct ForwardOp {
  const char* name;
  bool has_extras;  ///< terms, slopes and tables among its inputs
};
inline constexpr ForwardOp forward_ops[] = {{"AnyflashAttention1D", false},
                                            {"AnyflashAttention2D", false},
                                            {"AnyflashAttentionLast", true},
                                            {"AnyflashAttentionBhds", true}};
inline constexpr const char* backward_op = "AnyflashAttentionBackward";

void define_ops();
void register_kernels();

}  // namespace anyflash::tensorflow
