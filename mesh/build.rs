//! Generates the gRPC service around the messages of `control::wire`. Those are written by hand, so the build
//! needs no protoc.

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
    let namespaces = Method::builder()
        .name("namespaces")
        .route_name("Namespaces")
        .input_type("crate::control::wire::namespaces::NamespacesRequest")
        .output_type("crate::control::wire::namespaces::NamespacesReply")
        .codec_path("tonic_prost::ProstCodec")
        .build();
    let list_blocks = Method::builder()
        .name("list_blocks")
        .route_name("ListBlocks")
        .input_type("crate::control::wire::blocks::ListBlocksRequest")
        .output_type("crate::control::wire::blocks::ListBlocksReply")
        .codec_path("tonic_prost::ProstCodec")
        .build();
    let wait = Method::builder()
        .name("wait")
        .route_name("Wait")
        .input_type("crate::control::wire::WaitRequest")
        .output_type("crate::control::wire::WaitReply")
        .codec_path("tonic_prost::ProstCodec")
        .build();
    let inventory = Service::builder().package("pillion.mesh.v1").name("Inventory");
    let inventory = inventory.method(follow).method(namespaces).method(list_blocks).method(wait).build();
    Builder::new().compile(&[inventory]);
}
