//! The KV cache of a Pillion sidecar, for LLM engines in Rust.
//!
//! An engine [finds](Namespace::find) the namespace of its weights, [joins](Engine::join) it, and for each prompt [loads](Engine::load) the
//! kept KV, computes the rest, and [saves](Engine::save) it. Other engines of the namespace, such as vLLM, find it there. Keys,
//! block numbers, plans and the rules of serving, checking and keeping stay inside.
//!
//! Each call returns once its work is done, and an engine is used by one thread at a time. There is no async runtime. A missing, slow or
//! frozen sidecar is a miss, never an error. The engine's memory is the host's; no CUDA is called.
//!
//! ```
//! # let folder = tempfile::tempdir()?;
//! # let socket = folder.path().join("pillion.sock");
//! # let dram = Some("16MiB".parse()?);
//! # let http = Some("127.0.0.1:0".parse()?);
//! # let options = sidecar::config::ServeOptions { socket: Some(socket.clone()), dram, http, ..Default::default() };
//! # let server = sidecar::runtime::server::Server::start(&options.complete()?, sidecar::logging::LogLevel::default())?;
//! use pillion::{Engine, JoinOptions, Facts, LayerKv, Namespace};
//!
//! # let known = [
//! #     ("hash_algorithm", "sha256_cbor"), ("none_hash", "00000000000000000000000000000000000000000000000000000000000000aa"),
//! #     ("extra_keys", "tagged"), ("block_tokens", "4"), ("weights", "some"),
//! #     ("page_form", "layers=2 tokens=4 kv_heads=2 keys=8 values=8 dtype=float32 k=kv_heads*64+tokens*8+keys v=32+kv_heads*64+tokens*8+values packing=none"),
//! # ];
//! # let known: Facts = known.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
//! # let first = Engine::join(&socket, &Namespace::stated(known, 1)?, &JoinOptions::new("first", 16))?;
//! // The engine's own weights: `pillion::digest_weights(folder)?` digests files.
//! let stated = Facts::from([("weights".to_owned(), "some".to_owned())]);
//! let namespace = Namespace::find(&socket, &stated)?;
//! # drop(first);
//! // Without checks, which have an engine compute the last blocks of some hits.
//! let options = JoinOptions { check_every: 0, ..JoinOptions::new("mine", 16) };
//! let engine = Engine::join(&socket, &namespace, &options)?;
//!
//! let prompt: Vec<u32> = (100..111).collect();
//! let request = engine.load(&prompt);
//! let past: Vec<LayerKv<f32>> = engine.read(&request)?; // of each layer, dense [heads, held tokens, dim]
//! assert_eq!((request.held(), past.len()), (0, 2), "nothing is kept yet");
//! // The engine computes the KV of all tokens not held, in each layer.
//! let missing = prompt.len() - request.held();
//! let computed = vec![LayerKv { k: vec![0.5_f32; 2 * missing * 8], v: vec![0.25; 2 * missing * 8] }; 2];
//! assert_eq!(engine.save(&request, &prompt, &computed)?, 2, "two blocks are full and kept");
//! drop(request);
//!
//! let again = engine.load(&prompt);
//! assert_eq!(again.held(), 8);
//! assert_eq!(engine.read::<f32>(&again)?[1].k, vec![0.5; 2 * 8 * 8]);
//! # drop(again);
//! # engine.leave_sidecar();
//! # server.drain(std::time::Duration::from_secs(20))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! May depend on: shm-protocol and connector-shim. Never: maps memory, touches a ring, or has rules of its own.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod control;
mod engine;
mod error;
mod memory;
mod namespace;
pub mod pages;

pub use shm_protocol::hints::{HintAction, HintEnd};
pub use shm_protocol::namespace::Facts;

pub use self::control::ControlAddress;
pub use self::engine::{Engine, EngineRequest, JoinOptions, LayerKv};
pub use self::error::EngineError;
pub use self::namespace::{Namespace, digest_weights};
