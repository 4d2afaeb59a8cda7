//! Values that C passes by address: the only unsafe code of the C interface.
//!
//! C makes the types here as `pillion.h` describes them, or they are made from a slice. The header's contract
//! says that their targets exist and stay unchanged during the call, as with a reference among a function's
//! parameters.

use std::ffi::{CStr, c_char};
#[cfg(test)]
use std::mem::MaybeUninit;

use shm_protocol::key::BlockHash;

#[cfg(test)]
use super::error::Status;
use super::error::{CallFailure, require_pointer};

/// `count` items side by side. NULL if there are none.
#[repr(C)]
#[derive(Debug)]
pub struct Items<T> {
    /// The first item.
    items: *const T,
    /// Number of items.
    count: usize,
}

/// A text, UTF-8 with a zero at its end.
#[repr(transparent)]
#[derive(Debug)]
pub struct Text(*const c_char);

/// The hash of a block and of all blocks before it. A hash of 16 bytes has the second digest behind it, or
/// zeros if the engine does not make it.
#[repr(C)]
#[derive(Copy, Clone, Debug)]
pub struct Hash {
    /// The bytes.
    pub bytes: [u8; 32],
}

const _: () = assert!(size_of::<Hash>() == size_of::<BlockHash>() && align_of::<BlockHash>() == 1);

// === impl Items ===

impl<T> Items<T> {
    /// Items for C, valid as long as the slice.
    pub(super) fn of_slice(slice: &[T]) -> Self {
        Self { items: slice.as_ptr(), count: slice.len() }
    }

    pub(super) fn get(&self, name: &str) -> Result<&[T], CallFailure> {
        if self.count == 0 {
            return Ok(&[]);
        }
        let bytes = self.count.checked_mul(size_of::<T>()).filter(|bytes| *bytes <= isize::MAX as usize);
        if self.items.is_null() || !self.items.is_aligned() || bytes.is_none() {
            return Err(CallFailure::argument(format!(
                "{name}: {} items cannot lie at {:p}: pass the address of that many",
                self.count, self.items
            )));
        }
        // SAFETY: not null, aligned, and no longer than a slice can be, as was just checked. By the contract
        // under which C makes an `Items`, `count` items are there, initialised and unchanged while the call
        // lasts; an `Items` made by `of_slice` comes from a slice and is handed to C alone.
        Ok(unsafe { std::slice::from_raw_parts(self.items, self.count) })
    }
}

impl Items<Hash> {
    /// Hashes as C sees them.
    pub(super) fn of_hashes(hashes: &[BlockHash]) -> Self {
        Self { items: hashes.as_ptr().cast(), count: hashes.len() }
    }
}

impl Items<u8> {
    /// Returns exactly 16 bytes, or none.
    pub(super) fn get16(&self, name: &str) -> Result<Option<[u8; 16]>, CallFailure> {
        match self.get(name)? {
            [] => Ok(None),
            bytes => bytes.try_into().map(Some).map_err(|_| {
                CallFailure::argument(format!("{name} has {} bytes: pass 16, or none", bytes.len()))
            }),
        }
    }
}

// === impl Text ===

impl Text {
    pub(super) fn get(&self, name: &str) -> Result<&str, CallFailure> {
        require_pointer(name, self.get_some(name)?)
    }

    /// Returns the text, or `None` if it is NULL.
    pub(super) fn get_some(&self, name: &str) -> Result<Option<&str>, CallFailure> {
        if self.0.is_null() {
            return Ok(None);
        }
        // SAFETY: not null, as was just checked. By the contract under which C makes a `Text`, a zero ends it
        // and nobody changes it while the call lasts; nothing else can make one.
        let text = unsafe { CStr::from_ptr(self.0) };
        text.to_str()
            .map(Some)
            .map_err(|error| CallFailure::argument(format!("{name} is not UTF-8: {error}")))
    }
}

/// The result that a successful call writes for C, or the status of a failed one.
#[cfg(test)]
pub(super) fn take_result<T>(call: impl FnOnce(Option<&mut MaybeUninit<T>>) -> Status) -> Result<T, Status> {
    let mut result = MaybeUninit::uninit();
    match call(Some(&mut result)) {
        // SAFETY: every exported call writes its result before it answers OK.
        Status::Ok => Ok(unsafe { result.assume_init() }),
        status => Err(status),
    }
}

#[cfg(test)]
impl Text {
    pub(super) fn of_static(text: &'static CStr) -> Self {
        Self(text.as_ptr())
    }

    pub(super) fn null() -> Self {
        Self(std::ptr::null())
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn items_that_cannot_be_are_refused() {
        let ids = [1_u32, 2, 3];
        assert_eq!(Items::of_slice(&ids).get("ids").unwrap(), ids);
        let none = Items::<u32> { items: ptr::null(), count: 0 };
        assert!(none.get("ids").unwrap().is_empty());
        let odd = ptr::without_provenance(5);
        for items in [
            Items::<u32> { items: ptr::null(), count: 1 },
            Items { items: odd, count: 1 },
            Items { items: ids.as_ptr(), count: usize::MAX },
        ] {
            assert!(items.get("ids").unwrap_err().text.starts_with("ids: "));
        }
    }

    #[test]
    fn sixteen_bytes_or_none() {
        assert_eq!(Items::of_slice(&[7; 16]).get16("fold").unwrap(), Some([7; 16]));
        assert_eq!(Items::of_slice(&[]).get16("fold").unwrap(), None);
        assert_eq!(
            Items::of_slice(&[7; 15]).get16("fold").unwrap_err().text,
            "fold has 15 bytes: pass 16, or none"
        );
    }

    #[test]
    fn texts_are_utf8() {
        assert_eq!(Text::of_static(c"Pillion").get("name").unwrap(), "Pillion");
        assert_eq!(Text::null().get("name").unwrap_err().text, "name is NULL: pass a pointer");
        assert_eq!(Text::null().get_some("name").unwrap(), None);
        assert!(Text::of_static(c"\xff").get("name").unwrap_err().text.contains("not UTF-8"));
    }
}
