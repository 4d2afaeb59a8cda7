//! A ring of transfers between one file and memory. A transfer in flight owns its memory: it is handed over
//! by value and comes back with the kernel's answer.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::io::Errno;
use shm_protocol::blocks::Blocks;
use shm_protocol::pool;

use super::transfer::{Direction, Memory, TRANSFERS_MAX, Transfer};

/// Bytes of the pool registered at a time: the most for one registered buffer. No block lies in two chunks,
/// since they consist of whole segments.
const CHUNK_BYTES: u64 = 1 << 30;
/// The most chunks of a ring (IORING_MAX_REG_BUFFERS); the largest pool has fewer.
const CHUNKS_MAX: u64 = 1 << 14;
const _: () = assert!(pool::POOL_BYTES_MAX / CHUNK_BYTES < CHUNKS_MAX);
/// The user data of the wake-up, no transfer.
const WAKE: u64 = u64::MAX;

/// A chunk of the pool.
#[derive(Copy, Clone, Debug, Eq, PartialEq)]
enum Chunk {
    Untried,
    Registered,
    Refused,
}

/// The ring of one file.
pub(crate) struct Ring {
    /// Dropped by hand: never while the kernel may still write a transfer's memory.
    shared: ManuallyDrop<Shared>,
    vacant: Vec<usize>,
    /// Empty if the kernel registers no buffers.
    chunks: Vec<Chunk>,
    note: Option<String>,
    file_registered: bool,
}

/// Memory shared with the kernel. The ring is the first field, so it is dropped first.
struct Shared {
    uring: IoUring,
    flights: Vec<Option<Transfer>>,
    blocks: Blocks,
    file: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
}

// === impl Ring ===

/// Makes the newest kind of ring in this kernel: one thread, completions taken at its calls.
fn build() -> io::Result<IoUring> {
    let entries = TRANSFERS_MAX as u32 + 1;
    let mut builder = IoUring::builder();
    builder.dontfork().setup_clamp();
    let newest =
        builder.clone().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().build(entries);
    newest.or_else(|_| builder.build(entries))
}

impl Ring {
    /// Makes a ring for `file`, for the calling thread alone. A write to the eventfd `wake` ends a wait.
    pub(crate) fn new(file: Arc<OwnedFd>, wake: Arc<OwnedFd>, blocks: Blocks) -> io::Result<Self> {
        let uring = build()?;
        let submitter = uring.submitter();
        let file_registered = submitter.register_files(&[file.as_raw_fd()]).is_ok();
        let count = blocks.len().div_ceil(CHUNK_BYTES) as u32;
        let (chunks, note) = match submitter.register_buffers_sparse(count) {
            Ok(()) => (vec![Chunk::Untried; count as usize], None),
            Err(error) => (Vec::new(), Some(not_registered(&error))),
        };
        let flights = (0..TRANSFERS_MAX).map(|_| None).collect();
        let shared = ManuallyDrop::new(Shared { uring, flights, blocks, file, wake });
        let vacant = (0..TRANSFERS_MAX).rev().collect();
        let mut ring = Self { shared, vacant, chunks, note, file_registered };
        ring.watch_wake();
        // A process that may make a ring but not use it fails here.
        ring.flush()?;
        Ok(ring)
    }

    /// Returns the number of transfers in the kernel.
    fn in_flight(&self) -> usize {
        TRANSFERS_MAX - self.vacant.len()
    }

    /// Takes a note for the operator's log, once.
    pub(crate) fn take_note(&mut self) -> Option<String> {
        self.note.take()
    }

    /// Hands a transfer over; gives it back if the ring is full. The kernel has it after the next
    /// [`Ring::flush`].
    pub(crate) fn push(&mut self, transfer: Transfer) -> Result<(), Transfer> {
        let Some(at) = self.vacant.pop() else { return Err(transfer) };
        let entry = match self.entry(&transfer) {
            Some(entry) => entry.user_data(at as u64),
            None => unreachable!("places in the pool are checked when a job is taken on"),
        };
        self.shared.flights[at] = Some(transfer);
        self.push_entry(&entry);
        Ok(())
    }

    fn push_entry(&mut self, entry: &squeue::Entry) {
        // SAFETY: the addresses in the entry lie in a transfer of `flights`, freed no earlier than its
        // completion arrives, or in the pool, whose mapping lives as long as the ring. Both are leaked if the
        // completion cannot be waited for. The poll entry has no address.
        let pushed = unsafe { self.shared.uring.submission().push(entry) };
        pushed.expect("the queue has an entry for every transfer and the wake-up");
    }

    fn entry(&mut self, transfer: &Transfer) -> Option<squeue::Entry> {
        let skip = transfer.moved as usize;
        let len = transfer.len - transfer.moved;
        let (address, fixed) = match &transfer.memory {
            Memory::Own(buffer) => (buffer.address(skip, len as usize)?.as_ptr(), None),
            Memory::Pool(offset) => {
                let offset = offset + u64::from(transfer.moved);
                (self.shared.blocks.address(offset, len as usize)?.as_ptr(), self.chunk(offset, len))
            }
        };
        let at = transfer.at + u64::from(transfer.moved);
        // A registered file is named by its number, and by a flag.
        let file = types::Fd(if self.file_registered { 0 } else { self.shared.file.as_raw_fd() });
        let flags = if transfer.durable { libc::RWF_DSYNC } else { 0 };
        let entry = match (transfer.direction, fixed) {
            (Direction::Read, None) => opcode::Read::new(file, address, len).offset(at).build(),
            (Direction::Write, None) => {
                opcode::Write::new(file, address, len).offset(at).rw_flags(flags).build()
            }
            (Direction::Read, Some(chunk)) => {
                opcode::ReadFixed::new(file, address, len, chunk).offset(at).build()
            }
            (Direction::Write, Some(chunk)) => {
                opcode::WriteFixed::new(file, address, len, chunk).offset(at).rw_flags(flags).build()
            }
        };
        let entry = if self.file_registered { entry.flags(squeue::Flags::FIXED_FILE) } else { entry };
        Some(entry)
    }

    /// Returns the registered chunk of a range of the pool. The first use of a chunk registers it.
    fn chunk(&mut self, offset: u64, len: u32) -> Option<u16> {
        let number = offset.checked_sub(pool::SEGMENT_ALIGN)? / CHUNK_BYTES;
        let begin = pool::SEGMENT_ALIGN + number * CHUNK_BYTES;
        let bytes = CHUNK_BYTES.min(self.shared.blocks.len() - begin);
        if offset + u64::from(len) > begin + bytes {
            return None;
        }
        if *self.chunks.get(number as usize)? == Chunk::Untried {
            self.register(number as u32, begin, bytes as usize);
        }
        (self.chunks[number as usize] == Chunk::Registered).then_some(number as u16)
    }

    fn register(&mut self, number: u32, begin: u64, bytes: usize) {
        let address = self.shared.blocks.address(begin, bytes).expect("a chunk lies in the pool");
        let chunk = libc::iovec { iov_base: address.as_ptr().cast(), iov_len: bytes };
        // SAFETY: the range lies in the pool's mapping, and that lives as long as the ring.
        let registered =
            unsafe { self.shared.uring.submitter().register_buffers_update(number, &[chunk], None) };
        match registered {
            Ok(()) => self.chunks[number as usize] = Chunk::Registered,
            Err(error) => {
                // A limit once reached stays reached: the rest of the pool is not tried.
                self.note = Some(not_registered(&error));
                let untried = self.chunks.iter_mut().filter(|chunk| **chunk == Chunk::Untried);
                untried.for_each(|chunk| *chunk = Chunk::Refused);
            }
        }
    }

    fn watch_wake(&mut self) {
        let poll = opcode::PollAdd::new(types::Fd(self.shared.wake.as_raw_fd()), libc::POLLIN as u32);
        self.push_entry(&poll.build().user_data(WAKE));
    }

    /// Submits pushed transfers to the kernel, and takes completed ones.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let queue = self.shared.uring.submission();
        let idle = queue.is_empty() && !queue.taskrun() && !queue.cq_overflow();
        drop(queue);
        if idle { Ok(()) } else { entered(self.shared.uring.submit()) }
    }

    /// Does the same as [`Ring::flush`], and waits until a transfer has completed, the eventfd was written,
    /// or `limit` has passed.
    pub(crate) fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let submitter = self.shared.uring.submitter();
        entered(match limit {
            None => submitter.submit_and_wait(1),
            Some(limit) => {
                let time = types::Timespec::from(limit);
                submitter.submit_with_args(1, &types::SubmitArgs::new().timespec(&time))
            }
        })
    }

    /// Returns the next completed transfer, with the kernel's answer.
    pub(crate) fn reap(&mut self) -> Option<(Transfer, i32)> {
        loop {
            let entry = self.shared.uring.completion().next()?;
            if entry.user_data() == WAKE {
                // The count does not matter; the eventfd is empty only if another thread read it.
                let _ = rustix::io::read(&*self.shared.wake, &mut [0u8; 8]);
                self.watch_wake();
                continue;
            }
            let at = usize::try_from(entry.user_data()).expect("a number of ours");
            let transfer = self.shared.flights[at].take().expect("one completion for one transfer");
            self.vacant.push(at);
            return Some((transfer, entry.result()));
        }
    }
}

impl Drop for Ring {
    /// Frees the memory only if the kernel has none of it.
    fn drop(&mut self) {
        if self.in_flight() > 0 {
            return;
        }
        // SAFETY: dropped here and nowhere else, and not used afterwards.
        unsafe { ManuallyDrop::drop(&mut self.shared) };
    }
}

/// Tells a permanent failure to enter the kernel from a passing one.
fn entered(result: io::Result<usize>) -> io::Result<()> {
    match result.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO)) {
        // Busy: completions must be taken first.
        Ok(_) | Err(Errno::INTR | Errno::TIME | Errno::AGAIN | Errno::BUSY) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

fn not_registered(error: &io::Error) -> String {
    format!(
        "SSD transfers run without registered buffers ({error}), which costs some CPU time: raise the limit of locked \
         memory (ulimit -l, LimitMEMLOCK) to the DRAM pool's size, or give CAP_IPC_LOCK"
    )
}
