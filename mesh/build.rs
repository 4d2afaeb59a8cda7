//! The gRPC service around the messages of `control::wire`, which are written by hand: so no protoc is needed for it.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let follow = Method::builder()
        .name("follow")
        .route_name("Follow")
        .input_type("crate::control::wire::FollowRequest")
        .output_type("crate::control::wire::FollowReply")
        .codec_path("tonic_prost::ProstCodec")
        .server_streaming()
        .build();
    let inventory = Service::builder().package("pillion.mesh.v1").name("Inventory").method(follow).build();
    Builder::new().compile(&[inventory]);
}
