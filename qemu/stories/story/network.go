//go:build story

package story

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/garboard-os/garboard/qemu/keeper"
)

// Network is a place in the network of nodes that are containers: what is started
// there is on the machine that has the network's first address.
func (c *Cluster) Network() *keeper.Keeper {
	c.t.Helper()
	k, err := c.network()
	if err != nil {
		c.t.Fatalf("enter the nodes' network: %v", err)
	}
	c.t.Cleanup(func() {
		if err := k.Close(); err != nil {
			c.t.Error(err)
		}
	})
	return k
}

// network finds the namespace, which has no name, by the thread of the host process
// that lives in it.
func (c *Cluster) network() (*keeper.Keeper, error) {
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
	for _, thread := range threads {
		if ns, err := os.Readlink(thread); err == nil && ns != own { // a thread may be gone
			return keeper.NewIn(thread)
		}
	}
	return nil, errors.New("no thread of the host process is in a namespace of its own")
}
