package selfhosted

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/garboard-os/garboard/api/client"
	apiv1 "github.com/garboard-os/garboard/api/garboardv1"
	"github.com/garboard-os/garboard/qemu"
	"gopkg.in/yaml.v3"
)

const (
	// answerBudget is for one request to a node, and probeBudget for one that may be off.
	answerBudget = 30 * time.Second
	probeBudget  = 3 * time.Second
)

// machines is a client of the machine API of a cluster's nodes.
type machines struct{ access *client.Context }

func newMachines(c *qemu.Cluster) (machines, error) {
	file, err := client.Load(c.ClientConfig())
	if err != nil {
		return machines{}, err
	}
	access, err := file.Current("")
	return machines{access}, err
}

// call connects to a node. A new connection for each call notices a node that has restarted.
func (m machines) call(ctx context.Context, n qemu.Node, limit time.Duration, do func(context.Context, *client.Client) error) error {
	c, err := client.Dial(m.access, n.Address.String())
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return do(ctx, c)
}

// list returns the names of the files in a directory of a node.
func (m machines) list(ctx context.Context, n qemu.Node, dir string) (names []string, err error) {
	err = m.call(ctx, n, answerBudget, func(ctx context.Context, c *client.Client) error {
		return client.Receive(ctx, c.File.List, &apiv1.ListFilesRequest{Path: dir, Depth: 1}, func(f *apiv1.FileInfo) error {
			if f.Error == "" && strings.HasPrefix(f.Mode, "-") {
				names = append(names, f.Name)
			}
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", dir, err)
	}
	return names, nil
}

// has returns nil if a directory of a node has a file whose name begins with a prefix.
func (m machines) has(ctx context.Context, n qemu.Node, dir, prefix string) error {
	names, err := m.list(ctx, n, dir)
	if err == nil && !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, prefix) }) {
		err = fmt.Errorf("no file %s… in %s yet", prefix, dir)
	}
	return err
}

// only returns nil if all files in a directory of a node begin with a prefix.
func (m machines) only(ctx context.Context, n qemu.Node, dir, prefix string) error {
	names, err := m.list(ctx, n, dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !strings.HasPrefix(name, prefix) {
			return fmt.Errorf("checkpoint %s is still active", name)
		}
	}
	return nil
}

// files returns the files in a directory of a node, by name.
func (m machines) files(ctx context.Context, n qemu.Node, dir string) (map[string][]byte, error) {
	names, err := m.list(ctx, n, dir)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", n.Name, err)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s: no files in %s, which a static pod needs: 'gbctl -n %s ls -l %s' shows it", n.Name, dir, n.Address, dir)
	}
	files := map[string][]byte{}
	for _, name := range names {
		if files[name], err = m.read(ctx, n, path.Join(dir, name)); err != nil {
			return nil, err
		}
	}
	return files, nil
}

// read returns a file of a node.
func (m machines) read(ctx context.Context, n qemu.Node, name string) (data []byte, err error) {
	err = m.call(ctx, n, answerBudget, func(ctx context.Context, c *client.Client) error {
		return client.Receive(ctx, c.File.Read, &apiv1.ReadFileRequest{Path: name}, func(chunk *apiv1.FileChunk) error {
			data = append(data, chunk.Data...)
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("%s: read %s: %w", n.Name, name, err)
	}
	return data, nil
}

// resources returns the specs of a node's resources of one type, by ID, as YAML.
func (m machines) resources(ctx context.Context, n qemu.Node, kind string) (map[string]string, error) {
	specs := map[string]string{}
	err := m.call(ctx, n, answerBudget, func(ctx context.Context, c *client.Client) error {
		list, err := client.Unary(ctx, c.Resource.List, &apiv1.ListResourcesRequest{Type: kind})
		for _, r := range list.GetItems() {
			specs[r.Id] = r.Spec
		}
		return err
	})
	return specs, err
}

// staticPods returns a node's rendered static pods, by the name of the program.
func (m machines) staticPods(ctx context.Context, n qemu.Node) (map[string]object, error) {
	specs, err := m.resources(ctx, n, "StaticPods")
	if err != nil {
		return nil, fmt.Errorf("%s: get static pods: %w", n.Name, err)
	}
	pods := map[string]object{}
	for id, spec := range specs {
		var pod object
		if err := yaml.Unmarshal([]byte(spec), &pod); err != nil {
			return nil, fmt.Errorf("%s: static pod %s: %w", n.Name, id, err)
		}
		pods[id] = pod
	}
	return pods, nil
}

// selfHosted returns nil if a node reports that its control plane is self-hosted.
func (m machines) selfHosted(ctx context.Context, n qemu.Node) error {
	specs, err := m.resources(ctx, n, "BootstrapStatuses")
	if err != nil {
		return err
	}
	for _, spec := range specs {
		var status struct {
			SelfHosted bool `yaml:"selfHosted"`
		}
		if err := yaml.Unmarshal([]byte(spec), &status); err == nil && status.SelfHosted {
			return nil
		}
	}
	return fmt.Errorf("it doesn't report a self-hosted control plane: 'gbctl -n %s get bootstrapstatuses' shows what it reports", n.Address)
}

func (m machines) config(ctx context.Context, n qemu.Node) (current *apiv1.GetConfigResponse, err error) {
	err = m.call(ctx, n, answerBudget, func(ctx context.Context, c *client.Client) (err error) {
		current, err = client.Unary(ctx, c.Config.Get, &apiv1.GetConfigRequest{})
		return err
	})
	return current, err
}

func (m machines) apply(ctx context.Context, n qemu.Node, r *apiv1.ApplyConfigRequest) error {
	return m.call(ctx, n, answerBudget, func(ctx context.Context, c *client.Client) error {
		_, err := c.Config.Apply(ctx, connect.NewRequest(r))
		return err
	})
}

// reboot reboots a node at once: the quorum of etcd is lost in any case.
func (m machines) reboot(ctx context.Context, n qemu.Node) error {
	return m.call(ctx, n, answerBudget, func(ctx context.Context, c *client.Client) error {
		_, err := c.Operation.Reboot(ctx, connect.NewRequest(&apiv1.RebootRequest{Force: true, KeepPods: true}))
		return err
	})
}

// bootID identifies the current boot of a node.
func (m machines) bootID(ctx context.Context, n qemu.Node) (id string, err error) {
	err = m.call(ctx, n, probeBudget, func(ctx context.Context, c *client.Client) error {
		status, err := client.Unary(ctx, c.Node.Status, &apiv1.NodeStatusRequest{})
		id = status.GetBootId()
		return err
	})
	return id, err
}
