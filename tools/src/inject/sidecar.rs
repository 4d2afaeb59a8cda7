//! What a pod gets: the sidecar's container and its volumes, as deploy/kubernetes has them.

use super::document::{below, item, single_quoted};
use super::{Copies, Options};
use sidecar::config::Size;

pub(super) const NAME: &str = "pillion";
/// A user that no image has.
const USER: &str = "65532";
/// What a sidecar takes beside its pool: the index, sessions, and the host's part of a context on a GPU.
const BESIDE_POOL_MIB: u64 = 2048;
/// The pool file's header, and a page for each of its segments.
const BESIDE_BLOCKS_MIB: u64 = 1024;
const MIB: u64 = 1 << 20;
/// Where both containers have the socket.
const SOCKET_FOLDER: &str = "/run/pillion";
/// On the pool's volume, which no engine mounts: an engine that runs as root may use every socket that it sees. `pillion serve` and
/// `pillion ctl` read the same variable.
const CONTROL_SOCKET: &str = "name: PILLION_CONTROL_SOCKET\nvalue: /var/lib/pillion/pool/control.sock";
const READ_ONLY: &str = "\nreadOnly: true";

/// The sidecar's container, an item of `initContainers`. `group` is the engine's, `claims` are of devices.
pub(super) fn container(options: &Options, group: &str, claims: &[&str]) -> String {
    let parts = [
        format!("name: {NAME}"),
        format!("image: {}", single_quoted(&options.image)),
        "restartPolicy: Always".to_owned(),
        below("args", &items(&arguments(options, group))),
        below("env", &environment(options, claims)),
        below("ports", &ports(options)),
        probe("livenessProbe", "/healthz", 5, 6),
        probe("readinessProbe", "/readyz", 2, 30),
        resources(options.dram, claims),
        below("securityContext", &security(group)),
        below("volumeMounts", &mounts(options)),
    ];
    parts.join("\n")
}

/// The volumes, items of `volumes`.
pub(super) fn volumes(options: &Options) -> Vec<String> {
    let memory = |name: &str, size: String| {
        format!("name: {NAME}-{name}\n{}", below("emptyDir", &format!("medium: Memory\nsizeLimit: {size}")))
    };
    let mut volumes =
        vec![memory("socket", "1Mi".to_owned()), memory("pool", mebibytes(options.dram, BESIDE_BLOCKS_MIB))];
    if let Some(secret) = &options.mesh_secret {
        let secret = format!("secretName: {}\ndefaultMode: 292", single_quoted(secret));
        volumes.push(format!("name: {NAME}-tls\n{}", below("secret", &secret)));
    }
    volumes
}

/// The engine's mount of the socket's folder, an item of its `volumeMounts`.
pub(super) fn engine_mount() -> String {
    mount("socket", SOCKET_FOLDER, READ_ONLY)
}

fn mount(volume: &str, path: &str, more: &str) -> String {
    format!("name: {NAME}-{volume}\nmountPath: {path}{more}")
}

fn items(lines: &[String]) -> String {
    lines.iter().map(|line| item(line)).collect::<Vec<_>>().join("\n")
}

fn arguments(options: &Options, group: &str) -> Vec<String> {
    let mut arguments = vec![
        "serve".to_owned(),
        format!("--dram={}", exact(options.dram)),
        "--socket=/run/pillion/pillion.sock".to_owned(),
        format!("--socket-group={group}"),
        "--http=0.0.0.0:9440".to_owned(),
        "--pool-path=/var/lib/pillion/pool/blocks".to_owned(),
        "--pool-view=/var/lib/pillion/view/blocks".to_owned(),
        "--log-format=json".to_owned(),
    ];
    if options.copy == Copies::Engine {
        arguments.push("--gpu=off".to_owned());
    }
    if !options.peer.is_empty() {
        arguments.push("--mesh-listen=$(POD_IP):9441".to_owned());
        arguments.extend(options.peer.iter().map(|peer| format!("--peer={peer}")));
        arguments.extend(options.node_id.iter().map(|node| format!("--node-id={node}")));
        match &options.mesh_secret {
            Some(_) => arguments.extend([
                "--mesh-cert=/etc/pillion/tls/tls.crt".to_owned(),
                "--mesh-key=/etc/pillion/tls/tls.key".to_owned(),
                "--mesh-ca=/etc/pillion/tls/ca.crt".to_owned(),
                format!("--mesh-cert-name={}", options.mesh_cert_name),
            ]),
            None => arguments.push("--mesh-plaintext".to_owned()),
        }
    }
    arguments.iter().map(|argument| single_quoted(argument)).collect()
}

fn environment(options: &Options, claims: &[&str]) -> String {
    let mut variables = vec![CONTROL_SOCKET.to_owned()];
    if options.copy == Copies::Sidecar && claims.is_empty() {
        variables.push("name: NVIDIA_VISIBLE_DEVICES\nvalue: all".to_owned());
        variables.push("name: NVIDIA_DRIVER_CAPABILITIES\nvalue: compute,utility".to_owned());
    }
    let field = |name: &str, path: &str| {
        format!("name: {name}\n{}", below("valueFrom", &below("fieldRef", &format!("fieldPath: {path}"))))
    };
    if !options.peer.is_empty() {
        variables.push(field("POD_IP", "status.podIP"));
    }
    if options.node_id.is_some() {
        variables.push(field("POD_NAME", "metadata.name"));
    }
    items(&variables)
}

fn ports(options: &Options) -> String {
    let mut ports = vec![("pillion", 9440)];
    if !options.peer.is_empty() {
        ports.extend([("pillion-mesh", 9441), ("pillion-blocks", 9442)]);
    }
    let lines: Vec<_> =
        ports.iter().map(|(name, port)| format!("name: {name}\ncontainerPort: {port}")).collect();
    items(&lines)
}

fn probe(name: &str, path: &str, period_s: u32, failures: u32) -> String {
    let get = below("httpGet", &format!("path: {path}\nport: pillion"));
    let times = format!("periodSeconds: {period_s}\ntimeoutSeconds: 5\nfailureThreshold: {failures}");
    below(name, &format!("{get}\n{times}"))
}

fn resources(dram: Size, claims: &[&str]) -> String {
    let memory = mebibytes(dram, BESIDE_POOL_MIB);
    let mut lines = vec![
        below("requests", &format!("cpu: '2'\nmemory: {memory}")),
        below("limits", &format!("memory: {memory}")),
    ];
    if !claims.is_empty() {
        let names: Vec<_> = claims.iter().map(|claim| format!("name: {}", single_quoted(claim))).collect();
        lines.push(below("claims", &items(&names)));
    }
    below("resources", &lines.join("\n"))
}

fn security(group: &str) -> String {
    format!(
        "runAsUser: {USER}\nrunAsGroup: {group}\nrunAsNonRoot: true\nreadOnlyRootFilesystem: true\n\
         allowPrivilegeEscalation: false\n{}\n{}",
        below("capabilities", "drop: [ALL]"),
        below("seccompProfile", "type: RuntimeDefault")
    )
}

fn mounts(options: &Options) -> String {
    let mut mounts = vec![
        mount("socket", SOCKET_FOLDER, ""),
        mount("pool", "/var/lib/pillion/pool", ""),
        mount("pool", "/var/lib/pillion/view", READ_ONLY),
    ];
    if options.mesh_secret.is_some() {
        mounts.push(mount("tls", "/etc/pillion/tls", READ_ONLY));
    }
    items(&mounts)
}

/// A size and so much more, as Kubernetes writes it.
fn mebibytes(size: Size, more_mib: u64) -> String {
    match size.as_bytes().div_ceil(MIB) + more_mib {
        mebibytes if mebibytes.is_multiple_of(1024) => format!("{}Gi", mebibytes / 1024),
        mebibytes => format!("{mebibytes}Mi"),
    }
}

/// A size as `pillion serve` reads it, to the byte.
fn exact(size: Size) -> String {
    match size.as_bytes() {
        bytes if bytes.is_multiple_of(1 << 30) => format!("{}GiB", bytes >> 30),
        bytes if bytes.is_multiple_of(MIB) => format!("{}MiB", bytes >> 20),
        bytes => bytes.to_string(),
    }
}
