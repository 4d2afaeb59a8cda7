//! NVIDIA GPUs: another process' KV memory, locked host memory, streams, and copies by the copy engines alone.
//!
//! libcuda is opened at run time. Without it [`is_present`] returns false, and nothing else may be called. No
//! kernel is ever launched: a copy from another process costs the engine nothing, while a kernel halves its
//! launches.
//!
//! Obligation of every caller that enqueues: words and memory stay registered until the stream has passed all
//! uses of them. [`CopyStream`] meets it by itself.

mod batch;
mod device;
mod error;
mod export;
mod gpu;
mod lanes;
mod memory;
mod plan;
mod stream;

pub use batch::{Blocks, CopyStream};
pub use device::{DeviceMemory, StageStream};
pub use error::CudaError;
pub use export::{Exported, export};
pub use gpu::{Gpu, driver_version, is_present};
pub use memory::{Imported, Registered};
pub use stream::{Event, Stream};
