//go:build e2e

package e2etest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/qemu/osthread"
)

// Network returns a thread in the network of nodes that are containers. Programs that are
// started on it use the network's first address.
func (c *Cluster) Network() *osthread.Thread {
	c.t.Helper()
	thread, err := c.network()
	if err != nil {
		c.t.Fatalf("enter the nodes' network: %v", err)
	}
	c.t.Cleanup(func() {
		if err := thread.Close(); err != nil {
			c.t.Error(err)
		}
	})
	return thread
}

// network finds the namespace, which has no name, through the thread of the host process
// that is in it.
func (c *Cluster) network() (*osthread.Thread, error) {
	pid, err := c.HostPID()
	if err != nil {
		return nil, err
	}
	own, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/net", pid))
	if err != nil {
		return nil, err
	}
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/net", pid))
	if err != nil {
		return nil, err
	}
	for _, path := range threads {
		if ns, err := os.Readlink(path); err == nil && ns != own { // a thread may be gone
			return osthread.NewIn(path)
		}
	}
	return nil, errors.New("no thread of the host process is in a namespace of its own")
}
