//! The generated gRPC client and server for the messages of [`super::wire`].
#![allow(missing_docs, clippy::all, clippy::too_many_lines, reason = "written by tonic-build")]

include!(concat!(env!("OUT_DIR"), "/pillion.mesh.v1.Inventory.rs"));
