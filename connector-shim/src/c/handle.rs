//! The common part of all handles: the lock, the check for forked children, and the messages for logs.

use std::collections::VecDeque;
use std::ffi::{CString, c_char};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::{Mutex, TryLockError};

use super::error::{CallFailure, Status, require_pointer, run_call};
use crate::error::refuse_forked;

/// 16 random bytes that name one run of an engine; see `getrandom(2)`.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct Run {
    /// The bytes.
    pub bytes: [u8; 16],
}

/// The target of a handle.
#[derive(Debug)]
pub(super) struct GuardedHandle<S> {
    session: Mutex<S>,
    owner: u32,
}

/// Messages for the engine's log, handed over one by one.
#[derive(Debug, Default)]
pub(super) struct HandleNotices {
    waiting: VecDeque<String>,
    current: CString,
}

// === impl GuardedHandle ===

impl<S> GuardedHandle<S> {
    pub(super) fn new(session: S) -> Self {
        Self { session: Mutex::new(session), owner: std::process::id() }
    }

    /// Runs one call. A forked child is refused before the lock, since its parent may have held the lock.
    pub(super) fn enter_call<T>(
        &self,
        call: impl FnOnce(&mut S) -> Result<T, CallFailure>,
    ) -> Result<T, CallFailure> {
        refuse_forked(self.owner)?;
        let mut session = self.session.try_lock().map_err(|error| match error {
            TryLockError::Poisoned(_) => CallFailure::internal(),
            TryLockError::WouldBlock => {
                let text =
                    "another thread is inside a call with this handle: use it from one thread at a time";
                CallFailure { status: Status::Busy, text: text.into() }
            }
        })?;
        call(&mut session)
    }
}

/// Frees a handle, if there is one. `leave` ends its session, except in a forked child: the session belongs
/// to the parent.
pub(super) fn end_handle<S>(handle: Option<GuardedHandle<S>>, leave: impl FnMut(&mut S)) {
    run_call(|| {
        let handle = handle.filter(|handle| refuse_forked(handle.owner).is_ok());
        let session = handle.map(|handle| handle.session.into_inner());
        session.and_then(Result::ok).iter_mut().for_each(leave);
        Ok(())
    });
}

/// Writes a result for C. Fails before it computes the result when `out` is NULL.
pub(super) fn put_result<T>(
    name: &str,
    out: Option<&mut MaybeUninit<T>>,
    result: impl FnOnce() -> T,
) -> Result<(), CallFailure> {
    require_pointer(name, out)?.write(result());
    Ok(())
}

// === impl HandleNotices ===

impl HandleNotices {
    /// Returns the next message, valid until the next call; NULL when there is none.
    pub(super) fn next(&mut self, more: impl FnOnce() -> Vec<String>) -> *const c_char {
        self.waiting.extend(more());
        match self.waiting.pop_front() {
            None => ptr::null(),
            Some(text) => {
                self.current = CString::new(text.replace('\0', " ")).expect("its zeros were replaced");
                self.current.as_ptr()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::error::last_text;
    use super::*;

    #[test]
    fn a_panic_is_a_status_and_ends_the_handle_alone() {
        let handle = GuardedHandle::new(1);
        let panics = || handle.enter_call(|_| -> Result<(), CallFailure> { panic!("on purpose") });
        assert_eq!(run_call(panics), Status::Internal);
        assert_eq!(
            run_call(|| handle.enter_call(|_| Ok(()))),
            Status::Internal,
            "its session may be half changed"
        );
        assert_eq!(run_call(|| GuardedHandle::new(2).enter_call(|_| Ok(()))), Status::Ok);
        assert!(last_text().contains("report it"), "a success leaves the text");
    }

    #[test]
    fn two_threads_in_one_handle_are_told_so() {
        let handle = GuardedHandle::new(1);
        let nested = || handle.enter_call(|_| handle.enter_call(|_| Ok(())));
        assert_eq!(run_call(nested), Status::Busy);
        assert_eq!(run_call(|| handle.enter_call(|_| Ok(()))), Status::Ok);
    }

    #[test]
    fn a_text_reaches_c_whole() {
        assert_eq!(run_call(|| Err(CallFailure::argument("one\0two"))), Status::Argument);
        assert_eq!(last_text(), "one two");
        assert_eq!(run_call(|| require_pointer("log", None::<&u8>).map(drop)), Status::Argument);
        assert_eq!(last_text(), "log is NULL: pass a pointer");
    }
}
