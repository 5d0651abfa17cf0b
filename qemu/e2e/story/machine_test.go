//go:build e2e && long

package story

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
)

const (
	// makeBudget is for the clone, the images, and two media.
	makeBudget = 15 * time.Minute
	// bootBudget is for firmware, boot loader and kernel, as on real hardware, until the machine is on the network.
	bootBudget = 40 * time.Second
	// useBudget is for an installation, an upgrade and a rollback, each with a node that becomes Ready, on real
	// hardware.
	useBudget = 10 * time.Minute
	// waitBudget is what the user gives health --wait, there.
	waitBudget = 5 * time.Minute
	// askBudget is for a request, there.
	askBudget = 30 * time.Second
)

// fingerprint matches that of the machine's certificate on the console.
var fingerprint = regexp.MustCompile(`[0-9A-F]{2}(:[0-9A-F]{2}){31}`)

// On a machine of one's own: a medium, the installation, Kubernetes, an upgrade, and back. No image comes from anywhere
// else than the medium.
func TestStoryOfAMachine(t *testing.T) {
	kubectl := e2etest.Built(t, qemu.QEMU).Kubectl()
	u := newUser(t)
	t.Setenv("PATH", filepath.Dir(kubectl)+":"+os.Getenv("PATH"))
	t.Setenv("ARGUMENTS", "--extra-kernel-arg "+strings.Join(e2etest.SerialArgs(), " --extra-kernel-arg "))
	u.types(nil, makeBudget, "machine.sh", "make", u.repository, u.dir)

	nothing := t.TempDir()
	if _, err := layout.Write(nothing, empty.Index); err != nil {
		t.Fatal(err)
	}
	c, m := e2etest.Start(t, "story-machine", qemu.QEMU, func(o *qemu.Options) {
		o.Boot.Medium, o.Boot.UEFI, o.Unconfigured, o.Images = filepath.Join(u.dir, "garboard/garboard.iso"), true, true, nothing
		o.MemoryMiB, o.DiskGiB = 2560, 10
	})
	print := fingerprint.FindString(c.Says(bootBudget, 0, "maintenance mode", "SHA-256").Text)
	m.Reached("maintenance mode")
	inside := c.Network()
	var listener net.Listener
	if err := inside.Do(func() (err error) { listener, err = net.Listen("tcp4", "10.5.0.1:0"); return err }); err != nil {
		t.Fatal(err)
	}
	blobs := registry.WithBlobHandler(registry.NewDiskBlobHandler(t.TempDir()))
	server := &http.Server{Handler: registry.New(blobs), ReadHeaderTimeout: time.Minute}
	done := make(chan error, 1)
	go func() { done <- server.Serve(listener) }()
	t.Cleanup(func() {
		_ = server.Close()
		<-done
	})
	t.Setenv("WAIT", c.Scale(waitBudget).String())
	t.Setenv("ASK", "--timeout "+c.Scale(askBudget).String())
	u.types(inside, c.Scale(useBudget), "machine.sh", "use", u.dir, c.Nodes[0].Address.String(), print, listener.Addr().String())
	m.Reached("the machine was installed and upgraded, and runs the former system")
}
