//! Routers of a mesh with certificates: its members are listed, or in etcd.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use crate::client::sidecar::{Sidecar, free_port};
use crate::client::{WATCHDOG, watch};
use crate::{AUTHORITY, Authority, Etcd, Pod, Trust};

/// A router, ended with the test.
struct Router {
    process: Child,
    port: u16,
}

impl Router {
    /// A router with these options for its members, and a certificate of this authority.
    fn start(members: &[String], files: &Pod, authority: &Authority) -> Self {
        let port = free_port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pillion"));
        command.args(["route", "--listen", &format!("127.0.0.1:{port}")]);
        command.args(members).args(files.credentials(authority));
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        watch("the router's start", || TcpStream::connect(("127.0.0.1", port)).ok());
        Self { process, port }
    }

    fn page(&self, path: &str) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        write!(stream, "GET {path} HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n").unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    }

    fn knows(&self, members: u64) -> bool {
        self.page("/metrics").contains(&format!("\npillion_route_mesh_members {members}\n"))
    }

    /// Waits until the router knows this many members, each with an engine.
    fn wait_members(&self, members: u64) {
        watch("the members and their engines", || {
            let engines = self.page("/health").contains(&format!("\"decode_up\":{members}"));
            (engines && self.knows(members)).then_some(())
        });
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn refused_certificates(sidecar: &Sidecar) -> u64 {
    let page = sidecar.page("/metrics").unwrap();
    let name = "pillion_mesh_refusals_total{reason=\"certificate\"} ";
    page.lines()
        .find_map(|line| line.strip_prefix(name))
        .expect("it is there from the start")
        .parse()
        .unwrap()
}

#[test]
fn a_router_observes_a_mesh_with_certificates_by_names_and_by_etcd() {
    let etcd = Etcd::start();
    // Routers of this authority trust the members, and are not trusted by them.
    let strange = Authority { pem: AUTHORITY.pem.clone(), ..Authority::new() };
    for by_etcd in [false, true] {
        let pods = [Pod::new("a"), Pod::new("b")];
        let members = |option: &str| match by_etcd {
            true => vec![format!("--etcd={}", etcd.url)],
            false => pods.iter().map(|pod| format!("--{option}={}", pod.address())).collect(),
        };
        let start = |pod: &Pod| {
            let engine = format!("--engine-url=http://127.0.0.1:{}=both", free_port());
            pod.start_by(&members("peer"), Trust::By(&AUTHORITY), &[&engine])
        };
        let [first, second] = pods.each_ref().map(start);
        let (files, strange_files) = (Pod::new("router"), Pod::new("stranger"));
        let router = Router::start(&members("mesh-peer"), &files, &AUTHORITY);
        router.wait_members(2);
        // The certificate of another authority is refused by members.
        let before = refused_certificates(&first);
        let stranger = Router::start(&members("mesh-peer"), &strange_files, &strange);
        watch("a refusal", || (refused_certificates(&first) > before).then_some(()));
        assert!(stranger.page("/health").contains("\"decode_up\":0"), "it learned nothing");
        for sidecar in [&first, &second] {
            assert_eq!(sidecar.metric("pillion_mesh_peers"), 1, "no router is a member");
        }
        second.terminate();
        if by_etcd {
            // A listed member leaves after 30 s of silence.
            watch("the end of a registration", || router.knows(1).then_some(()));
        }
        first.terminate();
    }
}
