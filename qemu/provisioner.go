package qemu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"

	"github.com/garboard-os/garboard/qemu/docker"
	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/qemu/vm"
)

// The ways to run a node.
const (
	Auto      = "auto"
	QEMU      = "qemu"
	Container = "container"
	Docker    = "docker"
)

// Choice is a way to run nodes, and the reason for it.
type Choice struct {
	Name string // QEMU, Container or Docker
	// Accelerator is QEMU's: kvm or tcg (software emulation). Empty for Container.
	Accelerator string
	Why         string
}

func (c Choice) String() string {
	if c.Name == QEMU {
		return fmt.Sprintf("nodes run in QEMU (%s): %s", c.Accelerator, c.Why)
	}
	if c.Name == Docker {
		return fmt.Sprintf("nodes run as containers of Docker: %s", c.Why)
	}
	return fmt.Sprintf("nodes run as containers: %s", c.Why)
}

// Choose decides how nodes run on this machine. want is Auto, QEMU, Container or Docker.
func Choose(ctx context.Context, want string) (Choice, error) {
	return chooser{
		root: os.Geteuid() == 0,
		qemu: func() error { _, err := exec.LookPath(vm.Program); return err },
		kvm:  func() error { return vm.ProbeKVM(ctx) },
		docker: func() error {
			d, err := docker.Open(ctx, "", "")
			if err == nil {
				err = d.Close()
			}
			return err
		},
	}.choose(want)
}

// chooser makes the decision. Its facts are fields, so that tests can set them.
type chooser struct {
	root   bool
	qemu   func() error // nil if QEMU is installed
	kvm    func() error // nil if KVM runs a guest
	docker func() error // nil if Docker answers
}

func (c chooser) choose(want string) (Choice, error) {
	switch want {
	case Container:
		if !c.root {
			return Choice{}, errors.New("nodes as containers need root, for namespaces and cgroups: run as root (sudo), or take the provisioner docker or qemu")
		}
		return Choice{Name: Container, Why: "asked for"}, nil
	case QEMU:
		return c.qemuChoice("asked for")
	case Docker:
		return Choice{Name: Docker, Why: "asked for"}, c.docker()
	case Auto, "":
	default:
		return Choice{}, fmt.Errorf("provisioner %q: must be %s, %s, %s or %s", want, QEMU, Container, Docker, Auto)
	}
	missing := c.qemu()
	if missing == nil {
		err := c.kvm()
		if err == nil {
			return Choice{Name: QEMU, Accelerator: "kvm", Why: "KVM ran a test guest"}, nil
		}
		if !c.root && c.docker() == nil {
			return Choice{Name: Docker, Why: err.Error()}, nil
		}
		if !c.root {
			return Choice{Name: QEMU, Accelerator: "tcg", Why: fmt.Sprintf("emulated, ten times slower; %v, and containers need root", err)}, nil
		}
		return Choice{Name: Container, Why: err.Error()}, nil
	}
	if c.root {
		return Choice{Name: Container, Why: fmt.Sprintf("no QEMU here (%v)", missing)}, nil
	}
	if c.docker() == nil {
		return Choice{Name: Docker, Why: fmt.Sprintf("no QEMU here (%v)", missing)}, nil
	}
	return Choice{}, fmt.Errorf("%w; install qemu-system-x86 or Docker, or run as root to have nodes as containers", missing)
}

func (c chooser) qemuChoice(why string) (Choice, error) {
	if err := c.qemu(); err != nil {
		return Choice{}, fmt.Errorf("%w; install the package qemu-system-x86", err)
	}
	if err := c.kvm(); err != nil {
		return Choice{Name: QEMU, Accelerator: "tcg", Why: fmt.Sprintf("%s; emulated in software, as there is %v", why, err)}, nil
	}
	return Choice{Name: QEMU, Accelerator: "kvm", Why: why + "; KVM ran a test guest"}, nil
}

// AptPackages are the Debian packages that running nodes needs, each with the reason.
func AptPackages() map[string]string {
	return map[string]string{
		"qemu-system-x86": "runs nodes as virtual machines",
		"ovmf":            "the UEFI of virtual machines",
	}
}

// running is one node from power-on to power-off.
type running interface {
	// Wait blocks until the node has ended. Several goroutines may call it.
	Wait() (exit.Reason, error)
	// PowerOff presses the power button: the node shuts down in order, in its own time.
	PowerOff(ctx context.Context) error
	// Cut ends the node at once, as a power failure does.
	Cut()
	// Freeze stops the node, or lets it run again.
	Freeze(ctx context.Context, frozen bool) error
	// Interrupt sends a nonmaskable interrupt, as the NMI button of a server does.
	Interrupt(ctx context.Context) error
}

// A provisioner runs the nodes of one cluster, on its network.
type provisioner interface {
	// Start starts a node. It needs ctx only until the node runs.
	Start(ctx context.Context, n Node) (running, error)
	// Close removes what the nodes share. All nodes must have ended.
	Close() error
}
