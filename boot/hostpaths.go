package boot

// HostPath is a directory that charts for Kubernetes mount from a node, and that other systems have.
type HostPath struct {
	Path string
	// At is where its content is, which pods may write; "": an empty directory of the image.
	At string
}

// HostPaths are in the root file system, and the kubelet sees them as pods do: it checks them, and makes what is to be
// below them. PID 1 reads nothing there. docs/host-paths.md lists them.
var HostPaths = settings.HostPaths
