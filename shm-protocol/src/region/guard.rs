//! A mapping of a file that others can cut: what is lost of it ends no process.
//!
//! A touch of a mapped page that its file has not any more is a SIGBUS. A handler puts memory of this process's own in place of
//! the whole mapping, zeros at first, and notes the loss; the thread that touched it goes on. The handler looks at atomics and
//! makes one system call, so it may run anywhere.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::extent::Extent;

/// Mappings that can be guarded at once: a process has one pool; tests have some.
const PLACES: usize = 64;
static GUARDED: [Place; PLACES] = [const { Place::empty() }; PLACES];
/// The process's SIGBUS action before ours: it gets the faults outside every guarded mapping.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A guarded range of addresses; empty while `end` is 0.
struct Place {
    taken: AtomicBool,
    start: AtomicUsize,
    end: AtomicUsize,
    lost: AtomicBool,
}

/// Guards a mapping until it is dropped, which must be before the mapping goes.
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
    /// Guards the shared mapping of `bytes` bytes of `file` at address `start`.
    pub(super) fn new(start: usize, bytes: usize, file: OwnedFd) -> Result<Self, Errno> {
        install()?;
        let free = |place: &Place| !place.taken.swap(true, Ordering::Acquire);
        let place = GUARDED.iter().position(free).ok_or(Errno::MFILE)?;
        let taken = &GUARDED[place];
        taken.lost.store(false, Ordering::Relaxed);
        taken.start.store(start, Ordering::Relaxed);
        // SYNC POINT(guarded): release; a handler that sees the end sees the start.
        taken.end.store(start + bytes, Ordering::Release);
        Ok(Self { place, extent: Extent::new(file, bytes as u64) })
    }

    /// See [`super::Region::is_whole`].
    pub(super) fn is_whole(&self) -> bool {
        let whole = self.extent.is_whole();
        // SYNC POINT(lost): after the reads of which the caller asks; acquire pairs with the handler.
        whole && !GUARDED[self.place].lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let place = &GUARDED[self.place];
        place.end.store(0, Ordering::Relaxed);
        // SYNC POINT(guarded): release; who takes the place next sees it empty.
        place.taken.store(false, Ordering::Release);
    }
}

/// Installs the handler, once in a process.
fn install() -> Result<(), Errno> {
    let mut result = Ok(());
    BEFORE.get_or_init(|| {
        // SAFETY: all zeros are a value of this plain C struct: the default action, no flags, no signal blocked.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let mut before = action;
        action.sa_sigaction = on_sigbus as *const () as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: both point to structs of this frame, and the handler has the signature that SA_SIGINFO asks for.
        if unsafe { libc::sigaction(libc::SIGBUS, &action, &mut before) } != 0 {
            result = Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::INVAL));
        }
        before
    });
    result
}

/// Puts memory in place of the mapping that was touched, or hands the signal on.
extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel passes the signal's information to a handler with SA_SIGINFO, and nobody else has it.
    let info = unsafe { &*info };
    // SAFETY: of a SIGBUS it has an address.
    let at = unsafe { info.si_addr() } as usize;
    for place in &GUARDED {
        // SYNC POINT(guarded): acquire; see `Guard::new`.
        let end = place.end.load(Ordering::Acquire);
        let start = place.start.load(Ordering::Relaxed);
        if at < start || at >= end {
            continue;
        }
        // SYNC POINT(lost): before the memory is there, so that whoever reads of it finds the loss when it asks.
        place.lost.store(true, Ordering::SeqCst);
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::FIXED | MapFlags::NORESERVE;
        // SAFETY: the range is a mapping of this process that its owner has guarded and not unmapped: a thread touches it now.
        // It stays readable and writable; its bytes are reached by atomics and raw pointers, which may see any value.
        if unsafe { rustix::mm::mmap_anonymous(start as *mut _, end - start, prot, flags) }.is_ok() {
            return;
        }
    }
    // Nobody's: as if there were no handler. The touch is repeated, and meets what was there before.
    if let Some(before) = BEFORE.get() {
        // SAFETY: `before` is what the kernel gave when the handler was installed.
        unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
    }
}
