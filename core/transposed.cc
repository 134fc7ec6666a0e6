#include "core/transposed.h"

namespace ds {

at::Tensor base_of_transposed(const at::Tensor& matrix) {
  if (matrix.dim() != 2 || !matrix.is_view()) return {};
  const at::Tensor base(matrix._base());
  const bool fits = base.dim() == 2 && base.size(0) == matrix.size(1) && base.size(1) == matrix.size(0) &&
                    base.stride(0) == matrix.stride(1) && base.stride(1) == matrix.stride(0) &&
                    base.storage_offset() == matrix.storage_offset();
  return fits ? base : at::Tensor();
}

}  // namespace ds
