package qemu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/garboard-os/garboard/qemu/docker"
	"github.com/garboard-os/garboard/qemu/network"
)

// networkVar is set in the network container: there, the host process is only what nodes need in their network.
const networkVar = "GARBOARD_NETWORK_CONTAINER"

const (
	// networkBudget is for the network container to serve, removeBudget for the containers of a cluster to be removed.
	networkBudget = 30 * time.Second
	removeBudget  = time.Minute
	// networkServes is in its output then.
	networkServes = "the network's services run"
)

var errOfDocker = errors.New("the network of a cluster in Docker belongs to Docker: only with other provisioners it can be changed")

// dockerNodes runs nodes as containers of Docker.
type dockerNodes struct {
	plan   Plan
	dir    clusterDir
	docker *docker.Docker
	image  string
}

// newDockerNodes makes what the nodes share: their image, their network, and the container with the registry and the
// load balancer.
func newDockerNodes(ctx context.Context, p Plan, d clusterDir, send func(report)) (_ *dockerNodes, err error) {
	n := &dockerNodes{plan: p, dir: d}
	if n.docker, err = docker.Open(ctx, p.Name, d.identity()); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.Close())
		}
	}()
	if err := n.docker.Remove(ctx); err != nil {
		return nil, fmt.Errorf("remove what an earlier run left: %w", err)
	}
	send(report{Step: "loading the image of the nodes into Docker"})
	if n.image, err = n.docker.Image(ctx, p.Boot.Rootfs, p.Boot.Init, p.Source); err != nil {
		return nil, err
	}
	send(report{Step: "creating network " + p.Name})
	if err := n.docker.MakeNetwork(ctx, p.Network, p.router()); err != nil {
		return nil, err
	}
	if p.balanced() {
		send(report{Step: "creating load balancer"})
	}
	return n, n.startNetwork(ctx)
}

// startNetwork starts the network container, and waits until it serves.
func (n *dockerNodes) startNetwork(ctx context.Context) error {
	log := n.dir.file("network.log")
	if err := os.RemoveAll(log); err != nil {
		return err
	}
	out, err := os.OpenFile(log, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	ports := []int{n.plan.KubernetesPort}
	for _, node := range n.plan.Nodes {
		ports = append(ports, node.APIPort)
	}
	if _, err := n.dir.loaded(); err != nil { // the container can't make it: it only reads the directory
		return err
	}
	_, err = n.docker.Start(ctx, docker.Container{
		Name: n.plan.Name, Image: n.image, Address: network.Gateway(n.plan.Network),
		Args:  append(n.plan.Self[:len(n.plan.Self):len(n.plan.Self)], "host", "--cluster", n.plan.Name),
		Env:   []string{networkVar + "=1", homeVar + "=" + filepath.Dir(filepath.Dir(string(n.dir)))},
		Ports: ports, Files: map[string]string{string(n.dir): string(n.dir)}, Tmpfs: []string{"/tmp"}, Restart: true,
	}, out)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, networkBudget)
	defer cancel()
	for !strings.Contains(ReadLast(log, logTail), networkServes) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("the network container of cluster %s doesn't serve within %s: %s", n.plan.Name, networkBudget, strings.TrimSpace(ReadLast(log, logTail)))
		case <-time.After(endPoll):
		}
	}
	return nil
}

func (n *dockerNodes) Start(ctx context.Context, node Node) (running, error) {
	volume := n.dir.identity() + "." + node.Name
	console, err := os.OpenFile(n.dir.console(node.Name), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	r, err := n.docker.Start(ctx, docker.Container{
		Name: node.Name, Image: n.image, Address: node.Address, Node: true,
		// services/front/sandbox/cmd/sandbox/adopted.go
		Args:    []string{"/usr/bin/sandbox", "adopted", "/sbin/init", "--mode=container"},
		Volumes: map[string]string{"/system/state": volume + ".state", "/var": volume + ".var"},
		Files:   map[string]string{"/run/garboard-seed/config.yaml": n.dir.config(node.Name)},
		Tmpfs:   []string{"/run", "/tmp"},
		CPUs:    node.CPUs, MemoryMiB: node.MemoryMiB,
	}, console)
	if err != nil {
		return nil, err // not r: an interface with nil in it
	}
	return r, nil
}

// Close removes the containers and the network. The volumes with the nodes' data stay.
func (n *dockerNodes) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeBudget)
	defer cancel()
	return errors.Join(n.docker.Remove(ctx), n.docker.Close())
}

// removeFromDocker removes all that Docker has of a cluster.
func removeFromDocker(ctx context.Context, p Plan, d clusterDir) error {
	has, err := docker.Open(ctx, p.Name, d.identity())
	if err != nil {
		return err
	}
	return errors.Join(has.Remove(ctx), has.RemoveData(ctx), has.Close())
}

// serveNetwork is the host process in the network container: the registry, the mirrors, the load balancer, and the
// ports for users.
func serveNetwork(ctx context.Context, name string, log *slog.Logger) (err error) {
	d, err := dirOf(name)
	if err != nil {
		return err
	}
	plan, err := readPlan(d)
	if err != nil {
		return err
	}
	nodes, err := plan.lan(d)
	if err != nil {
		return err
	}
	lan, err := network.Join(nodes, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lan.Close()) }()
	ports, err := openPorts(plan, d, lan, log)
	if err != nil {
		return err
	}
	defer ports.close()
	closeMirrors, err := lan.ServeMirrors()
	if err != nil {
		return err
	}
	defer closeMirrors()
	log.Info(networkServes)
	<-ctx.Done()
	return nil
}
