package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"
)

const (
	// insideServiceCommand is the second half of service.
	insideServiceCommand = "service-inside"

	// outputFD is where the service's own output goes. PID 1 reads its other end.
	outputFD = 3
	// socketFD is the path of the socket of PID 1. The service has it as file descriptor 3.
	socketFD = 4

	// goLine is PID 1's leave to run the program.
	goLine = "go\n"
	// maxSpec bounds the line with the spec: a hundred binds are a tenth of it.
	maxSpec = 64 << 10
)

// serviceReply is the answer to PID 1 about a complete sandbox. Package sandbox
// reads it. Both sides refuse unknown fields.
type serviceReply struct {
	// PID is the service's process, as PID 1 sees it.
	PID int `json:"pid"`
	// Without lists what the sandbox lacks here, and why. PID 1 logs it.
	Without []string `json:"without,omitempty"`
}

// runService makes the sandbox of one service, and leaves. Nothing of it stays
// resident beside the service: the kernel gives the service to PID 1 as its child.
//
//	PID 1                      sandbox service                  the service
//	  │ spec, one line (stdin) ───▶│
//	  │                            │ unshare mounts, tmpfs,
//	  │                            │ clone, cgroup, mounts ───────▶│ stops before exec
//	  │◀─ {"pid":N} (stdout) ──────│                               │
//	  │ Adopt(N): pidfd, noted     │                               │
//	  │ "go" (stdin) ─────────────▶│ opens its fifo ──────────────▶│ exec the program
//	  │◀────────────── exit 0 ─────┘                               │
//	  │◀═══════════════════════ now PID 1's child ═════════════════│
//
// Whichever of the two ends meanwhile, the other sees the end of a pipe and gives
// up: this process kills what it has made, and PID 1 kills and removes the cgroup,
// which is all that can be left. libcontainer's state and the sandbox's root lie on
// a tmpfs in this process' own mount namespace, and go with it.
func runService(args []string) error {
	if len(args) != 1 || args[0] != "-" {
		return errors.New("service: needs one spec, on standard input (-)")
	}
	return inMountNamespace(insideServiceCommand, args[0])
}

// runServiceInside is runService in its mount namespace.
func runServiceInside(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("%s is for service to call", insideServiceCommand)
	}
	in := bufio.NewReaderSize(os.Stdin, maxSpec)
	line, err := in.ReadSlice('\n')
	if err != nil {
		return fmt.Errorf("read the spec: %w", err)
	}
	spec, err := decodeServiceSpec(line)
	if err != nil {
		return fmt.Errorf("spec: %w", err)
	}
	output, socket := os.NewFile(outputFD, "the service's output"), os.NewFile(socketFD, "the service's socket")
	for _, f := range []*os.File{output, socket} {
		if _, err := f.Stat(); err != nil {
			return fmt.Errorf("file descriptor of %s: %w", f.Name(), err)
		}
		unix.CloseOnExec(int(f.Fd()))
	}
	root, state, err := serviceMounts(spec)
	if err != nil {
		return err
	}
	s, reply, err := buildSandbox(spec, root, state, output, socket)
	if err != nil {
		return err
	}
	if err := s.handOver(in, reply); err != nil {
		s.kill()
		return err
	}
	return nil
}

// sandboxed is a service that stops before its program is executed.
type sandboxed struct {
	container *libcontainer.Container
	process   *libcontainer.Process
}

// buildSandbox makes the sandbox with a user namespace or, if that isn't
// possible, without one. A kernel may have no user namespaces. In a container whose
// /proc is partly covered, the kernel refuses to mount /proc in one.
func buildSandbox(spec serviceSpec, root, state string, output, socket *os.File) (*sandboxed, serviceReply, error) {
	var reply serviceReply
	s, err := startSandbox(spec, root, state, output, socket, true)
	if err != nil {
		reply.Without = append(reply.Without, fmt.Sprintf("its own user namespace: %v", err))
		if s, err = startSandbox(spec, root, state, output, socket, false); err != nil {
			return nil, reply, err
		}
	}
	reply.PID, err = s.process.Pid()
	if err != nil {
		s.kill()
		return nil, reply, fmt.Errorf("process of service %s: %w", spec.ID, err)
	}
	return s, reply, nil
}

func startSandbox(spec serviceSpec, root, state string, output, socket *os.File, userNamespace bool) (*sandboxed, error) {
	container, err := libcontainer.Create(state, spec.ID, serviceConfig(spec, root, userNamespace))
	if err != nil {
		return nil, fmt.Errorf("create sandbox %s: %w", spec.ID, err)
	}
	process := &libcontainer.Process{
		Args:       spec.Args,
		Env:        spec.Env,
		UID:        spec.UID,
		GID:        spec.UID,
		Cwd:        "/",
		Stdout:     output,
		Stderr:     output,
		ExtraFiles: []*os.File{socket},
		Init:       true,
	}
	if err := container.Start(process); err != nil {
		err = fmt.Errorf("start sandbox %s: %w", spec.ID, err)
		if derr := container.Destroy(); derr != nil {
			err = errors.Join(err, fmt.Errorf("remove sandbox %s: %w", spec.ID, derr))
		}
		return nil, err
	}
	return &sandboxed{container, process}, nil
}

// handOver sends the process to PID 1, waits until PID 1 has registered it, and starts
// it.
func (s *sandboxed) handOver(in *bufio.Reader, reply serviceReply) error {
	line, err := json.Marshal(reply)
	if err != nil {
		return err
	}
	if _, err := os.Stdout.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("tell the process: %w", err)
	}
	leave := make([]byte, len(goLine))
	if _, err := io.ReadFull(in, leave); err != nil {
		return fmt.Errorf("wait for leave to run: %w", err)
	}
	if string(leave) != goLine {
		return fmt.Errorf("wait for leave to run: %q isn't it", leave)
	}
	return s.container.Exec()
}

// kill ends what was made; the cgroup is PID 1's to remove.
func (s *sandboxed) kill() {
	_ = s.process.Signal(unix.SIGKILL) // an error means that it's gone
	_, _ = s.process.Wait()
}

// serviceMounts prepares this process' own mount namespace: spec.Work becomes a
// tmpfs with the sandbox's root in it, empty but for the places to mount on.
func serviceMounts(spec serviceSpec) (root, state string, err error) {
	root, state, err = workMounts(spec.Work, quiet, "mode=0755,size=1m", 0o755)
	if err != nil {
		return "", "", err
	}
	for _, dir := range []string{"/proc", "/dev", "/tmp", spec.Dir, filepath.Dir(spec.Args[0])} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return "", "", err
		}
	}
	return root, state, os.WriteFile(filepath.Join(root, spec.Args[0]), nil, 0o644)
}

// serviceSpec is everything that one sandboxed service needs to run. Package
// sandbox of this module writes it; the two agree by this text, strictly.
type serviceSpec struct {
	// ID names the service: letters, digits and -_+. only.
	ID string `json:"id"`
	// Args is the program with its arguments.
	Args []string `json:"args"`
	Env  []string `json:"env"`
	// UID is the user and the group that the service runs as. It is the same one
	// inside and outside.
	UID int `json:"uid"`
	// Work is an empty directory for mounts. All users may search it: the root of a user
	// namespace is user nobody outside.
	Work string `json:"work"`
	// Cgroup is the service's cgroup, as a path from the top of each hierarchy.
	Cgroup string `json:"cgroup"`
	// Dir is visible inside, read-only, as the program is.
	Dir string `json:"dir"`

	MemoryMax   int64 `json:"memoryMax"` // bytes
	TasksMax    int64 `json:"tasksMax"`  // threads and processes
	OOMScoreAdj int   `json:"oomScoreAdj"`
}

func decodeServiceSpec(line []byte) (s serviceSpec, err error) {
	d := json.NewDecoder(bytes.NewReader(line))
	d.DisallowUnknownFields()
	return s, d.Decode(&s)
}
