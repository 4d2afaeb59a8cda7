//! Errors of the driver.

use std::ffi::CStr;

use cudarc::driver::sys;
use thiserror::Error;

/// A failed driver call.
#[derive(Copy, Clone, Debug, Eq, Error, PartialEq)]
#[error("{call}: error {code} ({name})")]
pub struct CudaError {
    call: &'static str,
    code: u32,
    name: &'static str,
}

// === impl CudaError ===

impl CudaError {
    /// Turns the result of a driver call into a `Result`.
    pub(super) fn check(call: &'static str, result: sys::CUresult) -> Result<(), Self> {
        match result {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            error => Err(Self::new(call, error)),
        }
    }

    pub(super) fn new(call: &'static str, error: sys::CUresult) -> Self {
        let mut name = std::ptr::null();
        // SAFETY: `name` is valid for the driver to store a pointer into; every error number is allowed.
        let found = unsafe { sys::cuGetErrorName(error, &raw mut name) };
        let named = found == sys::CUresult::CUDA_SUCCESS && !name.is_null();
        // SAFETY: the driver stored a pointer to a text of its own that ends with a zero and is never freed.
        let name = if named { unsafe { CStr::from_ptr(name) }.to_str().unwrap_or("?") } else { "?" };
        Self { call, code: error as u32, name }
    }

    /// An error for something missing, found by this code and not by the driver.
    pub fn missing(call: &'static str, name: &'static str) -> Self {
        Self { call, code: sys::CUresult::CUDA_ERROR_NOT_FOUND as u32, name }
    }
}
