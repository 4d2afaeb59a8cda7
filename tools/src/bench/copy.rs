//! Copies in memory: memcpy, and blocks between an engine's memory and the pool, as by the sidecar's threads.

use std::sync::{Barrier, Mutex, PoisonError};
use std::thread;

use clap::Args;
use copy_engine::{CopyError, HostMemory};
use shm_protocol::handshake::BlockRegion;
use shm_protocol::region::Access;

use super::{BenchError, BenchFigures, GIB, ROUNDS, median, memory, rounded};
use sidecar::config::{COPY_THREADS_DEFAULT, Size};
use sidecar::system::clock::Clock;

const THREADS_MAX: usize = 256;

/// Options of `pillion bench copy`.
#[derive(Args, Clone, Debug)]
pub struct CopyOptions {
    /// Threads that copy at the same time, as --copy-threads of pillion serve
    #[arg(long, value_name = "COUNT", default_value_t = COPY_THREADS_DEFAULT)]
    pub threads: usize,
    /// Bytes that all threads together copy in each measurement; four times as much memory is needed
    #[arg(long, value_name = "SIZE", default_value = "512MiB")]
    pub size: Size,
    /// Bytes of a block
    #[arg(long, value_name = "SIZE", default_value = "2MiB")]
    pub block_size: Size,
}

/// GiB/s of `threads` threads, each with its own blocks, all from the same moment on.
pub(super) fn time_copies<E: Send>(
    threads: usize,
    bytes: u64,
    copy: impl Fn(usize) -> Result<(), E> + Sync,
) -> Result<f64, E> {
    let (start, clock, copy) = (Barrier::new(threads + 1), Clock::start_now(), &copy);
    let began = thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    copy(thread)
                })
            })
            .collect();
        start.wait();
        let began = clock.now();
        let ended: Result<Vec<()>, E> =
            running.into_iter().map(|thread| thread.join().expect("it does not panic")).collect();
        ended.map(|_| began)
    })?;
    Ok(bytes as f64 / GIB / (clock.now() - began).as_secs_f64())
}

/// Measures threads with equal parts, each apart from the others.
pub(super) fn measure_copy(options: &CopyOptions) -> Result<BenchFigures, BenchError> {
    let (threads, block) = (options.threads, options.block_size.as_bytes());
    if !(1..=THREADS_MAX).contains(&threads) {
        return Err(BenchError::option("threads", threads, "it must be 1 to 256"));
    }
    let each = options.size.as_bytes().checked_div(block * threads as u64).unwrap_or_default();
    if each == 0 {
        let problem = "it must hold one block of --block-size for each thread";
        return Err(BenchError::option("size", options.size, problem));
    }
    let blocks = u32::try_from(each * threads as u64).map_err(|_| {
        BenchError::option("block-size", options.block_size, "there would be too many blocks: raise it")
    })?;
    let bytes = u64::from(blocks) * block;
    let ((engine, _mapped), (_pool, pool)) = (memory(bytes)?, memory(bytes)?);
    let failed = |error: CopyError| BenchError::failed("a block was not copied", error.to_string());
    let region = BlockRegion { fd: 0, offset: 0, stride: block, bytes: block };
    let engine = HostMemory::new(vec![engine], &[region], blocks, Access::ReadWrite).map_err(failed)?;
    let (part, from) = ((each * block) as usize, vec![1u8; bytes as usize]);
    let parts: Vec<_> = (0..threads).map(|_| Mutex::new(vec![2u8; part])).collect();
    let of = |thread: usize| (0..each).map(move |at| thread as u64 * each + at);
    let (mut limit, mut save, mut load) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        limit.push(time_copies(threads, bytes, |thread| -> Result<(), BenchError> {
            let mut to = parts[thread].lock().unwrap_or_else(PoisonError::into_inner);
            let from = &from[thread * part..];
            to.chunks_mut(block as usize).zip(from.chunks(block as usize)).for_each(|(to, from)| {
                to.copy_from_slice(from);
            });
            Ok(())
        })?);
        let saved = time_copies(threads, bytes, |thread| {
            of(thread).try_for_each(|at| engine.save_block(at as u32, &pool, at * block))
        });
        save.push(saved.map_err(failed)?);
        let loaded = time_copies(threads, bytes, |thread| {
            of(thread).try_for_each(|at| engine.load_block(&pool, at * block, at as u32))
        });
        load.push(loaded.map_err(failed)?);
    }
    let mut figures = BenchFigures::new("copy");
    figures.add_figure("threads", threads);
    let (most, save, load) = (median(&mut limit), median(&mut save), median(&mut load));
    for (name, value) in [("memcpy_gib_s", most), ("save_gib_s", save), ("load_gib_s", load)] {
        figures.add_figure(name, rounded(value));
    }
    figures.add_figure("save_ratio", rounded(save / most));
    figures.add_figure("load_ratio", rounded(load / most));
    Ok(figures)
}
