//! Pods and routers of one mesh.
#![allow(dead_code, reason = "each file uses its part")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use super::client::sidecar::{Sidecar, free_port};
use super::client::{WATCHDOG, watch};

/// Room for all conversations in each pod, and for a prompt of 100,000 tokens.
const DRAM: &str = "256MiB";

/// A pod of the mesh.
pub(crate) struct Pod {
    folder: tempfile::TempDir,
    name: String,
    port: u16,
    pub(crate) url_port: u16,
}

/// A router that follows the pods.
pub(crate) struct Router {
    pub(crate) process: Child,
    port: u16,
}

impl Pod {
    pub(crate) fn new(name: String) -> Self {
        let (port, url_port) = (free_port(), free_port());
        Self { folder: tempfile::tempdir().unwrap(), name, port, url_port }
    }

    fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The URL of its engine.
    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.url_port)
    }

    /// Its sidecar, which announces its engine with this role.
    pub(crate) fn start(&self, all: &[Self], role: Option<&str>) -> Sidecar {
        let mut arguments: Vec<String> =
            ["--dram", DRAM, "--mesh-plaintext", "--node-id", &self.name, "--mesh-listen", &self.address()]
                .map(String::from)
                .into();
        arguments.extend(all.iter().map(|pod| format!("--peer={}", pod.address())));
        arguments.extend(role.map(|role| format!("--engine-url={}={role}", self.url())));
        let arguments: Vec<&dyn AsRef<std::ffi::OsStr>> =
            arguments.iter().map(|it| it as &dyn AsRef<std::ffi::OsStr>).collect();
        let sidecar = Sidecar::start(self.folder.path(), &arguments);
        sidecar.wait_started();
        sidecar
    }
}

impl Router {
    /// A router of the mesh of these pods, by the address of one after the other.
    pub(crate) fn start(pods: &[Pod], arguments: &[&str]) -> Self {
        Self::start_logging(pods, arguments, Stdio::inherit())
    }

    /// The same, with this standard output.
    pub(crate) fn start_logging(pods: &[Pod], arguments: &[&str], out: Stdio) -> Self {
        let port = free_port();
        let mut command = Command::new(env!("CARGO_BIN_EXE_pillion"));
        command.args(["route", "--listen", &format!("127.0.0.1:{port}")]).args(arguments);
        command.args((!pods.is_empty()).then_some("--mesh-plaintext"));
        command.args(pods.iter().map(|pod| format!("--mesh-peer={}", pod.address())));
        let process = command.stderr(Stdio::null()).stdout(out).spawn().unwrap();
        let router = Self { process, port };
        watch("the router's start", || TcpStream::connect(("127.0.0.1", port)).ok());
        router
    }

    /// The status and the body of an answer.
    pub(crate) fn ask(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(WATCHDOG)).unwrap();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: r\r\nconnection: close\r\ncontent-length: ");
        write!(stream, "{head}{}\r\n\r\n{body}", body.len()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        (head.split(' ').nth(1).unwrap().parse().unwrap(), body.to_owned())
    }

    pub(crate) fn figure(&self, name: &str) -> u64 {
        let page = self.ask("GET", "/metrics", "").1;
        page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or(0)
    }

    /// Waits until the router knows so many members, and engines of both roles.
    pub(crate) fn wait_members(&self, members: u64, prefill: u64, decode: u64) {
        watch("the members and their engines", || {
            let health: Value = serde_json::from_str(&self.ask("GET", "/health", "").1).unwrap();
            let up = (health["prefill_up"].as_u64(), health["decode_up"].as_u64());
            (self.figure("pillion_route_mesh_members ") == members && up == (Some(prefill), Some(decode)))
                .then_some(())
        });
    }

    /// Waits until the router knows the namespaces, and finds a prompt.
    pub(crate) fn wait_located(&self, tokens: std::ops::Range<u32>) {
        watch("a prompt found by the mesh", || {
            self.ask(
                "POST",
                "/v1/completions",
                &json!({ "prompt": tokens.clone().collect::<Vec<_>>() }).to_string(),
            );
            (self.figure("pillion_route_located_total{result=\"held\"} ") > 0).then_some(())
        });
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
