//! A guard for the mapping of a file: if another process truncates the file, this process does not die.
//!
//! A thread that touches a mapped page beyond the file's end gets SIGBUS. The handler notes the loss, and
//! then puts private memory of this process, at first all zeros, in place of the whole mapping; the thread
//! goes on. From then on every thread of this process uses that memory, in the lost page and in all others.
//! Outside every guarded mapping, the process's earlier SIGBUS action applies.
//!
//! A reader asks [`Guard::is_whole`] after it has read its bytes: an answer of true says that none of them
//! were such zeros. An answer before the reads proves nothing.
//!
//! The handler uses atomics and one system call, so it may interrupt any code.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::extent::Extent;

/// Limit of mappings guarded at once. A process has one pool; a test process has several.
const PLACES: usize = 64;
static GUARDED: [GuardedRange; PLACES] = [const { GuardedRange::empty() }; PLACES];
/// The process's earlier SIGBUS action, for faults outside every guarded mapping.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// A guarded range of addresses; empty while `end` is 0.
struct GuardedRange {
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

// === impl GuardedRange ===

impl GuardedRange {
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
        let free = |place: &GuardedRange| !place.taken.swap(true, Ordering::Acquire);
        let place = GUARDED.iter().position(free).ok_or(Errno::MFILE)?;
        let taken = &GUARDED[place];
        taken.lost.store(false, Ordering::Relaxed);
        taken.start.store(start, Ordering::Relaxed);
        // SYNC POINT(guarded): release; a handler that loads the end sees the start.
        taken.end.store(start + bytes, Ordering::Release);
        Ok(Self { place, extent: Extent::new(file, bytes as u64) })
    }

    /// Returns true if no byte was lost until now; see [`super::Region::is_whole`].
    pub(super) fn is_whole(&self) -> bool {
        let whole = self.extent.is_whole();
        // SYNC POINT(lost): the caller has read its bytes before; acquire pairs with the handler's store.
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
        // SYNC POINT(lost): stored before the zeros are in place. A reader of these zeros finds the loss when
        // it asks after its reads. In the other order a reader could read zeros and then
        // find no loss.
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
    // The address is in no guarded mapping: the earlier action is restored. The thread repeats its touch, and
    // that action handles the signal.
    if let Some(before) = BEFORE.get() {
        // SAFETY: the kernel gave `before` when the handler was installed.
        unsafe { libc::sigaction(signal, before, std::ptr::null_mut()) };
    }
}
