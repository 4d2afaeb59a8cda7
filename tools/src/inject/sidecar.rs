//! The additions to a pod: the sidecar's container, the container with the connector, and their volumes, as
//! in deploy/kubernetes.

use super::yaml::Node;
use super::{CopySide, InjectOptions};
use sidecar::config::Size;

pub(super) const NAME: &str = "pillion";
/// The init container with the connector, and the volume between it and the engine.
pub(super) const CONNECTOR: &str = "pillion-connector";
/// Names of added containers and volumes; the user may have others, such as `pillion-disk`.
pub(super) const NAMES: [&str; 5] = [NAME, CONNECTOR, "pillion-socket", "pillion-pool", "pillion-tls"];
/// The mount of the connector's volume: a folder of the engine's `PYTHONPATH`.
pub(super) const CONNECTOR_FOLDER: &str = "/opt/pillion";
/// A user of no image.
const USER: &str = "65532";
/// MiB of a sidecar beside its pool: the index, sessions, and the host's part of a context on a GPU.
const BESIDE_POOL_MIB: u64 = 2048;
/// The pool file's header, and a page for each of its segments.
const BESIDE_BLOCKS_MIB: u64 = 1024;
const MIB: u64 = 1 << 20;
/// The folder of the socket in both containers.
pub(super) const SOCKET_FOLDER: &str = "/run/pillion";
const POOL_FOLDER: &str = "/var/lib/pillion/pool";

/// The init containers, in the order of their starts. `group` is the engine's group, `claims` are its claims
/// of devices.
pub(super) fn init_containers(
    options: &InjectOptions,
    group: &str,
    claims: &[&str],
    engine_url: Option<&str>,
) -> Vec<Node> {
    let connector = options.brings_connector().then(|| connector(options, group));
    connector.into_iter().chain([container(options, group, claims, engine_url)]).collect()
}

fn connector(options: &InjectOptions, group: &str) -> Node {
    Node::map([
        ("name", Node::plain(CONNECTOR)),
        ("image", Node::string(&options.image)),
        (
            "args",
            Node::List(vec![Node::string("connector"), Node::string(format!("--into={CONNECTOR_FOLDER}"))]),
        ),
        (
            "resources",
            Node::map([
                ("requests", Node::map([("cpu", Node::string("100m")), ("memory", Node::plain("64Mi"))])),
                ("limits", Node::map([("memory", Node::plain("64Mi"))])),
            ]),
        ),
        ("securityContext", security(group)),
        ("volumeMounts", Node::List(vec![mount(CONNECTOR, CONNECTOR_FOLDER, false)])),
    ])
}

fn container(options: &InjectOptions, group: &str, claims: &[&str], engine_url: Option<&str>) -> Node {
    let arguments = list_arguments(options, group, engine_url).into_iter().map(Node::string);
    Node::map([
        ("name", Node::plain(NAME)),
        ("image", Node::string(&options.image)),
        ("restartPolicy", Node::plain("Always")),
        ("args", Node::List(arguments.collect())),
        ("env", environment(options, claims)),
        ("ports", ports(options)),
        ("livenessProbe", probe("/healthz", 5, 6)),
        ("readinessProbe", probe("/readyz", 2, 30)),
        ("resources", resources(options, claims)),
        ("securityContext", security(group)),
        ("volumeMounts", mounts(options)),
    ])
}

/// The volumes of a pod.
pub(super) fn make_volumes(options: &InjectOptions) -> Vec<Node> {
    let memory = |name: &str, size: String| {
        let folder = Node::map([("medium", Node::plain("Memory")), ("sizeLimit", Node::plain(size))]);
        Node::map([("name", Node::plain(format!("{NAME}-{name}"))), ("emptyDir", folder)])
    };
    let mut volumes = vec![
        memory("socket", "1Mi".to_owned()),
        memory("pool", mebibytes(options.dram(), BESIDE_BLOCKS_MIB)),
    ];
    if options.brings_connector() {
        let folder = Node::map([("sizeLimit", Node::plain("256Mi"))]);
        volumes.push(Node::map([("name", Node::plain(CONNECTOR)), ("emptyDir", folder)]));
    }
    if let Some(secret) = &options.mesh_secret {
        let secret = Node::map([("secretName", Node::string(secret)), ("defaultMode", Node::plain("292"))]);
        volumes.push(Node::map([("name", Node::plain(format!("{NAME}-tls"))), ("secret", secret)]));
    }
    volumes
}

/// The engine's mounts.
pub(super) fn engine_mounts(options: &InjectOptions) -> Vec<Node> {
    let connector = options.brings_connector().then(|| mount(CONNECTOR, CONNECTOR_FOLDER, true));
    [mount("pillion-socket", SOCKET_FOLDER, true)].into_iter().chain(connector).collect()
}

fn mount(volume: &str, path: &str, read_only: bool) -> Node {
    let mut mount = Node::map([("name", Node::plain(volume)), ("mountPath", Node::plain(path))]);
    if read_only {
        mount.set_entry("readOnly", Node::plain("true"));
    }
    mount
}

/// The sidecar's command line.
pub(super) fn list_arguments(options: &InjectOptions, group: &str, engine_url: Option<&str>) -> Vec<String> {
    let mut arguments = vec![
        "serve".to_owned(),
        format!("--dram={}", exact(options.dram())),
        "--socket=/run/pillion/pillion.sock".to_owned(),
        format!("--socket-group={group}"),
        "--http=0.0.0.0:9440".to_owned(),
        "--pool-path=/var/lib/pillion/pool/blocks".to_owned(),
        "--pool-view=/var/lib/pillion/view/blocks".to_owned(),
        "--log-format=json".to_owned(),
    ];
    if options.copy == CopySide::Engine {
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
    arguments.extend(engine_url.map(|url| format!("--engine-url={url}")));
    arguments.extend(options.serve.iter().cloned());
    arguments
}

fn environment(options: &InjectOptions, claims: &[&str]) -> Node {
    // On the pool's volume, out of the engine's sight: an engine with the user root may use every socket that
    // it sees. `pillion serve` and `pillion ctl` read the same variable.
    let mut variables =
        vec![make_variable("PILLION_CONTROL_SOCKET", Node::plain(format!("{POOL_FOLDER}/control.sock")))];
    if options.copy == CopySide::Sidecar && claims.is_empty() {
        variables.push(make_variable("NVIDIA_VISIBLE_DEVICES", Node::plain("all")));
        variables.push(make_variable("NVIDIA_DRIVER_CAPABILITIES", Node::plain("compute,utility")));
    }
    let field = |name: &str, path: &str| {
        let source = Node::map([("fieldRef", Node::map([("fieldPath", Node::plain(path))]))]);
        Node::map([("name", Node::plain(name)), ("valueFrom", source)])
    };
    if options.has_mesh() {
        variables.push(field("POD_IP", "status.podIP"));
    }
    if options.node_id.is_some() {
        variables.push(field("POD_NAME", "metadata.name"));
    }
    Node::List(variables)
}

/// A variable of a container.
pub(super) fn make_variable(name: &str, value: Node) -> Node {
    Node::map([("name", Node::plain(name)), ("value", value)])
}

fn ports(options: &InjectOptions) -> Node {
    let mut ports = vec![("pillion", 9440)];
    if !options.peer.is_empty() {
        ports.extend([("pillion-mesh", 9441), ("pillion-blocks", 9442)]);
    }
    let port = |(name, number): (&str, u16)| {
        Node::map([("name", Node::plain(name)), ("containerPort", Node::plain(number.to_string()))])
    };
    Node::List(ports.into_iter().map(port).collect())
}

fn probe(path: &str, period_s: u32, failures: u32) -> Node {
    let number = |value: u32| Node::plain(value.to_string());
    Node::map([
        ("httpGet", Node::map([("path", Node::plain(path)), ("port", Node::plain("pillion"))])),
        ("periodSeconds", number(period_s)),
        ("timeoutSeconds", number(5)),
        ("failureThreshold", number(failures)),
    ])
}

fn resources(options: &InjectOptions, claims: &[&str]) -> Node {
    let memory =
        options.memory.map_or_else(|| mebibytes(options.dram(), BESIDE_POOL_MIB), |size| mebibytes(size, 0));
    let mut resources = Node::map([
        ("requests", Node::map([("cpu", Node::string(&options.cpu)), ("memory", Node::plain(&memory))])),
        ("limits", Node::map([("memory", Node::plain(&memory))])),
    ]);
    if !claims.is_empty() {
        let claims = claims.iter().map(|claim| Node::map([("name", Node::string(*claim))]));
        resources.set_entry("claims", Node::List(claims.collect()));
    }
    resources
}

fn security(group: &str) -> Node {
    Node::map([
        ("runAsUser", Node::plain(USER)),
        ("runAsGroup", Node::plain(group)),
        ("runAsNonRoot", Node::plain("true")),
        ("readOnlyRootFilesystem", Node::plain("true")),
        ("allowPrivilegeEscalation", Node::plain("false")),
        ("capabilities", Node::map([("drop", Node::List(vec![Node::plain("ALL")]))])),
        ("seccompProfile", Node::map([("type", Node::plain("RuntimeDefault"))])),
    ])
}

fn mounts(options: &InjectOptions) -> Node {
    let mut mounts = vec![
        mount("pillion-socket", SOCKET_FOLDER, false),
        mount("pillion-pool", POOL_FOLDER, false),
        mount("pillion-pool", "/var/lib/pillion/view", true),
    ];
    if options.mesh_secret.is_some() {
        mounts.push(mount("pillion-tls", "/etc/pillion/tls", true));
    }
    mounts.extend(options.mount.iter().map(|stated| mount(&stated.volume, &stated.path, false)));
    Node::List(mounts)
}

/// A size and so much more, as Kubernetes writes it.
fn mebibytes(size: Size, more_mib: u64) -> String {
    match size.as_bytes().div_ceil(MIB) + more_mib {
        mebibytes if mebibytes.is_multiple_of(1024) => format!("{}Gi", mebibytes / 1024),
        mebibytes => format!("{mebibytes}Mi"),
    }
}

/// A size to the byte, in the form of `pillion serve`.
fn exact(size: Size) -> String {
    match size.as_bytes() {
        bytes if bytes.is_multiple_of(1 << 30) => format!("{}GiB", bytes >> 30),
        bytes if bytes.is_multiple_of(MIB) => format!("{}MiB", bytes >> 20),
        bytes => bytes.to_string(),
    }
}
