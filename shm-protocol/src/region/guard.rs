//! A mapping of a file that other processes can cut, guarded so a loss does not end this process.
//!
//! A touch of a mapped page beyond its file's end is a SIGBUS. The handler puts memory of this process in
//! place of the whole mapping, zeros at first, and notes the loss; the touching thread goes on. The handler
//! uses atomics and one system call, so it may run anywhere.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::extent::Extent;

/// Most mappings guarded at once: a process has one pool; tests have some.
const PLACES: usize = 64;
static GUARDED: [Place; PLACES] = [const { Place::empty() }; PLACES];
/// The process's earlier SIGBUS action: it gets the faults outside every guarded mapping.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A guarded range of addresses; empty while `end` is 0.
struct Place {
    taken: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

/// Guards a mapping until it is dropped; drop it before the mapping.
#[derive(Debug)]
pub(super) struct Guard {
    place: usize,
    extent: Extent,
}

// === impl Place ===

impl Place {
    const fn empty() -> Self {
        let (taken, lost) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { taken, start: AtomicUsize::new(0), end: AtomicUsize::new(0), lost }
    }
}

// === impl Guard ===

impl Guard {
    /// Guards the shared mapping of `bytes` bytes of `file` at address `start`. Fails with MFILE if all
    /// places are taken.
    pub(super) fn new(start: usize, bytes: usize, file: OwnedFd) -> Result<Self, Errno> {
        install()?;
        let free = |place: &Place| !place.taken.swap(true, Ordering::Acquire);
        let place = GUARDED.iter().position(free).ok_or(Errno::MFILE)?;
        let taken = &GUARDED[place];
        taken.lost.store(false, Ordering::Relaxed);
        taken.start.store(start, Ordering::Relaxed);
        // SYNC POINT(guarded): release; a handler that loads the end sees the start.
        taken.end.store(start + bytes, Ordering::Release);
        Ok(Self { place, extent: Extent::new(file, bytes as u64) })
    }

    /// See [`super::Region::is_whole`].
    pub(super) fn is_whole(&self) -> bool {
        let whole = self.extent.is_whole();
        // SYNC POINT(lost): after the caller's reads; acquire pairs with the handler.
        whole && !GUARDED[self.place].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let place = &GUARDED[self.place];
        place.end.store(0, Ordering::Relaxed);
        // SYNC POINT(guarded): release; the next guard in this place sees it empty.
        place.taken.store(false, Ordering::Release);
    }
}

/// Installs the handler, once in a process.
fn install() -> Result<(), Errno> {
    let mut result = Ok(());
    BEFORE.get_or_init(|| {
        // SAFETY: all zeros are a value of this plain C struct: the default action, no flags, no signal
        // blocked.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let mut before = action;
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: both point to structs of this frame, and the handler has the signature for SA_SIGINFO.
        if unsafe { libc::sigaction(libc::SIGBUS, &action, &mut before) } != 0 {
            result = Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
        }
        before
    });
    result
}

/// Puts memory in place of the touched mapping, or hands the signal on.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes the signal's information to a handler with SA_SIGINFO, and no other code has
    // it.
    let info = unsafe { &*info };
    // SAFETY: the information of a SIGBUS has an address.
    let at = unsafe { info.si_addr() } as usize;
    for place in &GUARDED {
        // SYNC POINT(guarded): acquire; see `Guard::new`.
        let end = place.end.load(Ordering::Acquire);
        let start = place.start.load(Ordering::Relaxed);
        if at < start || at >= end {
            continue;
        }
        // SYNC POINT(lost): stored before the memory is there, so a reader of that memory finds the loss in
        // its later check.
        place.lost.store(true, Ordering::SeqCst);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range is a mapping of this process, guarded and not yet unmapped: a thread touches it
        // now. It stays readable and writable; its bytes are reached by atomics and raw pointers, and any
        // value is valid for these.
        if unsafe { rustix::mm::mmap_anonymous(start as *mut _, end - start, prot, flags) }.is_ok() {
            return;
        }
    }
    // No guarded mapping has the address: restore the earlier action. The touch is repeated and meets that
    // action.
    if let Some(before) = BEFORE.get() {
        // SAFETY: the kernel gave `before` when the handler was installed.
        unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
    }
}
