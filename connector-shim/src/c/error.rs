//! The result of a call for C: a status, and a text for people.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::ShimError;

/// The result of a call. Without a sidecar, or with a slow or full one, a call succeeds and the answer is
/// "miss".
#[repr(C)]
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The caller passed an invalid argument: correct the caller.
    Argument = 1,
    /// The sidecar refuses this engine: do what the text says.
    Refused = 2,
    /// The KV memory cannot be shared with the sidecar: run without the cache.
    Memory = 3,
    /// The GPU's driver failed.
    Device = 4,
    /// The bytes are not a plan of this release: use one release in all processes of the engine.
    Plan = 5,
    /// A forked child used a handle of its parent: make one in the child.
    Forked = 6,
    /// Another thread is inside a call with this handle: let one thread at a time use it.
    Busy = 7,
    /// An internal error of Pillion, described on stderr. Every later call with the handle returns this
    /// status.
    Internal = 8,
}

/// A failed call, as C sees it.
#[derive(Debug)]
pub(super) struct CallFailure {
    pub(super) status: Status,
    pub(super) text: String,
}

thread_local! {
    static ERROR_TEXT: RefCell<CString> = RefCell::default();
}

// === exported ===

/// The release of this library, such as "0.1.0". Valid for ever.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => unreachable!(),
        };
    VERSION.as_ptr()
}

/// The cause of this thread's last failed call, and the remedy; empty before the first failure. Valid until
/// the next failed call of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn pillion_error_text() -> *const c_char {
    // An ending thread has lost its text.
    ERROR_TEXT.try_with(|text| text.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

// === impl CallFailure ===

impl From<ShimError> for CallFailure {
    fn from(error: ShimError) -> Self {
        let status = match &error {
            ShimError::Argument(_) | ShimError::Hello(_) | ShimError::Key(_) => Status::Argument,
            ShimError::Plan(_) => Status::Plan,
            ShimError::Memory(_) | ShimError::Export(_) => Status::Memory,
            ShimError::Cuda(_) | ShimError::Probe(_) | ShimError::NoRescueStream { .. } => Status::Device,
            ShimError::Refused(_) | ShimError::Differs(_) => Status::Refused,
            ShimError::Forked { .. } => Status::Forked,
        };
        Self { status, text: error.to_string() }
    }
}

impl CallFailure {
    pub(super) fn argument(text: impl Into<String>) -> Self {
        Self { status: Status::Argument, text: text.into() }
    }

    pub(super) fn internal() -> Self {
        let text = "pillion met an internal error, printed on stderr: restart the engine and report it";
        Self { status: Status::Internal, text: text.into() }
    }
}

/// Runs a call and returns its status, also when it panics.
pub(super) fn run_call(call: impl FnOnce() -> Result<(), CallFailure>) -> Status {
    let failure = match catch_unwind(AssertUnwindSafe(call)) {
        Ok(Ok(())) => return Status::Ok,
        Ok(Err(failure)) => failure,
        Err(_) => CallFailure::internal(),
    };
    let text = CString::new(failure.text.replace('\0', " ")).expect("its zeros were replaced");
    // An ending thread cannot store the text; the status suffices.
    let _ = ERROR_TEXT.try_with(|last| last.replace(text));
    failure.status
}

/// Returns the pointer, or an argument error with its name when it is NULL.
pub(super) fn require_pointer<T>(name: &str, pointer: Option<T>) -> Result<T, CallFailure> {
    pointer.ok_or_else(|| CallFailure::argument(format!("{name} is NULL: pass a pointer")))
}

#[cfg(test)]
pub(super) fn last_text() -> String {
    ERROR_TEXT.with(|text| text.borrow().to_str().expect("a String before").to_owned())
}
