// Package docker runs nodes as containers of Docker, through its API alone: it needs neither root nor anything of this
// machine's kernel.
//
//	docker network CLUSTER
//	  ├─ container CLUSTER: this program, with the registry of the images and the load balancer, at the first address
//	  │    └─ published on 127.0.0.1: the Kubernetes API, and the machine API of each node
//	  └─ container NODE: the root file system of a node, with a volume for its state and one for its data
package docker

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
)

// label of all that belongs to a cluster; its value is the cluster's identity.
const label = "dev.garboard.cluster"

// logSize bounds what Docker itself keeps of a console.
const logSize = "4m"

// removePoll is how often a container that is being removed is looked at.
const removePoll = 200 * time.Millisecond

// Docker is the connection to a daemon, for one cluster.
type Docker struct {
	api               *client.Client
	cluster, identity string
}

// Open connects to the daemon that DOCKER_HOST names, or to the usual one. Other users of the daemon may have a cluster
// of the same name: it has another identity.
func Open(ctx context.Context, cluster, identity string) (*Docker, error) {
	api, err := client.New(client.FromEnv)
	if err == nil {
		_, err = api.Ping(ctx, client.PingOptions{})
	}
	if err != nil {
		return nil, fmt.Errorf("docker: %w; start it, or name its socket in DOCKER_HOST", err)
	}
	return &Docker{api: api, cluster: cluster, identity: identity}, nil
}

// Close ends the connection.
func (d *Docker) Close() error { return d.api.Close() }

func (d *Docker) labels() map[string]string { return map[string]string{label: d.identity} }

func (d *Docker) mine() client.Filters { return client.Filters{}.Add("label", label+"="+d.identity) }

// MakeNetwork makes the network of the nodes. Its gateway, which is this machine, has another address than the first:
// that is the network container's.
func (d *Docker) MakeNetwork(ctx context.Context, prefix netip.Prefix, gateway netip.Addr) error {
	_, err := d.api.NetworkCreate(ctx, d.cluster, client.NetworkCreateOptions{
		Driver: "bridge", Labels: d.labels(),
		IPAM: &network.IPAM{Config: []network.IPAMConfig{{Subnet: prefix, Gateway: gateway}}},
	})
	if err != nil {
		return fmt.Errorf("docker network %s with %s: %w", d.cluster, prefix, err)
	}
	return nil
}

// RemoveData removes the volumes of the cluster, and the images of nodes, also of former builds, unless another cluster
// uses them.
func (d *Docker) RemoveData(ctx context.Context) error {
	volumes, err := d.api.VolumeList(ctx, client.VolumeListOptions{Filters: d.mine()})
	errs := []error{err}
	for _, v := range volumes.Items {
		_, err := d.api.VolumeRemove(ctx, v.Name, client.VolumeRemoveOptions{})
		errs = append(errs, gone(err))
	}
	images, err := d.api.ImageList(ctx, client.ImageListOptions{Filters: client.Filters{}.Add("reference", reference("*"))})
	errs = append(errs, err)
	for _, image := range images.Items {
		for _, tag := range image.RepoTags {
			if _, err := d.api.ImageRemove(ctx, tag, client.ImageRemoveOptions{}); !errdefs.IsConflict(err) {
				errs = append(errs, gone(err))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("docker: remove the data of cluster %s: %w", d.cluster, err)
	}
	return nil
}

// Remove removes the containers and the network of the cluster.
func (d *Docker) Remove(ctx context.Context) error {
	var errs []error
	containers, err := d.api.ContainerList(ctx, client.ContainerListOptions{All: true, Filters: d.mine()})
	errs = append(errs, err)
	for _, c := range containers.Items {
		errs = append(errs, d.remove(ctx, c.ID))
	}
	networks, err := d.api.NetworkList(ctx, client.NetworkListOptions{Filters: d.mine()})
	errs = append(errs, err)
	for _, n := range networks.Items {
		_, err := d.api.NetworkRemove(ctx, n.ID, client.NetworkRemoveOptions{})
		errs = append(errs, gone(err))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("docker: remove cluster %s: %w", d.cluster, err)
	}
	return nil
}

// remove removes a container. Somebody else may have begun that.
func (d *Docker) remove(ctx context.Context, container string) error {
	for {
		_, err := d.api.ContainerRemove(ctx, container, client.ContainerRemoveOptions{Force: true, RemoveVolumes: true})
		if !errdefs.IsConflict(err) {
			return gone(err)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(removePoll):
		}
	}
}

func gone(err error) error {
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

// Container is a node, or the network container.
type Container struct {
	Name, Image string
	Address     netip.Addr
	Args        []string // the program and its arguments
	Env         []string
	Ports       []int             // published on 127.0.0.1, with the same numbers
	Volumes     map[string]string // of the node: path in it → name
	Files       map[string]string // path in it → file or directory of this machine, read-only
	Tmpfs       []string
	Node        bool // it has the privileges of a node
	Restart     bool // Docker starts it again when it ends
	CPUs        int  // 0: no limit
	MemoryMiB   int  // 0: no limit
}

// capabilities are those of a node besides Docker's default, as far as all kernels have them: all but those for the
// clock, the modules and the resource limits of the host.
var capabilities = []string{
	"AUDIT_CONTROL", "AUDIT_READ", "BLOCK_SUSPEND", "DAC_READ_SEARCH", "IPC_LOCK", "IPC_OWNER", "LEASE", "LINUX_IMMUTABLE", "MAC_ADMIN",
	"MAC_OVERRIDE", "NET_ADMIN", "NET_BROADCAST", "SYSLOG", "SYS_ADMIN", "SYS_BOOT", "SYS_NICE", "SYS_PACCT", "SYS_PTRACE", "SYS_RAWIO",
	"SYS_TTY_CONFIG", "WAKE_ALARM",
}

// options are what Docker makes the container of.
func (d *Docker) options(c Container) client.ContainerCreateOptions {
	host := &container.HostConfig{
		NetworkMode: container.NetworkMode(d.cluster), ReadonlyRootfs: true, CgroupnsMode: container.CgroupnsModePrivate,
		LogConfig: container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": logSize, "max-file": "1"}},
		Tmpfs:     map[string]string{}, PortBindings: network.PortMap{},
		Resources: container.Resources{NanoCPUs: int64(c.CPUs) * 1e9, Memory: int64(c.MemoryMiB) << 20},
	}
	if c.Node {
		// Not privileged: it would have the devices of the host, and could change its settings.
		host.CapAdd = capabilities
		host.SecurityOpt = []string{"seccomp=unconfined", "apparmor=unconfined"}
		host.DeviceCgroupRules = []string{"a *:* rwm"}
		host.MaskedPaths, host.ReadonlyPaths = []string{"/proc/sysrq-trigger"}, []string{"/proc/bus", "/proc/fs", "/proc/irq"}
	}
	if c.Restart {
		host.RestartPolicy.Name = container.RestartPolicyAlways
	}
	exposed := network.PortSet{}
	for _, p := range c.Ports {
		port := network.MustParsePort(strconv.Itoa(p) + "/tcp")
		exposed[port] = struct{}{}
		host.PortBindings[port] = []network.PortBinding{{HostIP: netip.MustParseAddr("127.0.0.1"), HostPort: strconv.Itoa(p)}}
	}
	for path, volume := range c.Volumes {
		host.Mounts = append(host.Mounts, mount.Mount{
			Type: mount.TypeVolume, Source: volume, Target: path, VolumeOptions: &mount.VolumeOptions{NoCopy: true, Labels: d.labels()},
		})
	}
	for path, file := range c.Files {
		host.Mounts = append(host.Mounts, mount.Mount{Type: mount.TypeBind, Source: file, Target: path, ReadOnly: true})
	}
	for _, path := range c.Tmpfs {
		host.Tmpfs[path] = "exec,nosuid,nodev,mode=755"
	}
	return client.ContainerCreateOptions{
		Name:       c.Name,
		Config:     &container.Config{Hostname: c.Name, Image: c.Image, Entrypoint: c.Args, Env: c.Env, Labels: d.labels(), ExposedPorts: exposed},
		HostConfig: host,
		NetworkingConfig: &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{
			d.cluster: {IPAMConfig: &network.EndpointIPAMConfig{IPv4Address: c.Address}},
		}},
	}
}

// Start makes a container anew and starts it. What it prints goes to console.
func (d *Docker) Start(ctx context.Context, c Container, console io.WriteCloser) (*Running, error) {
	r, err := d.start(ctx, c, console)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("docker: start %s: %w", c.Name, err), console.Close())
	}
	return r, nil
}

func (d *Docker) start(ctx context.Context, c Container, console io.WriteCloser) (*Running, error) {
	// One of the same name that isn't the cluster's stays, and is an error.
	former, err := d.api.ContainerInspect(ctx, c.Name, client.ContainerInspectOptions{})
	if err == nil && former.Container.Config.Labels[label] == d.identity {
		err = d.remove(ctx, former.Container.ID)
	}
	if gone(err) != nil {
		return nil, err
	}
	made, err := d.api.ContainerCreate(ctx, d.options(c))
	if err != nil {
		return nil, err
	}
	output, err := d.api.ContainerAttach(context.WithoutCancel(ctx), made.ID, client.ContainerAttachOptions{Stream: true, Stdout: true, Stderr: true})
	if err != nil {
		return nil, err
	}
	if _, err := d.api.ContainerStart(ctx, made.ID, client.ContainerStartOptions{}); err != nil {
		output.Close()
		return nil, errors.Join(err, d.remove(context.WithoutCancel(ctx), made.ID))
	}
	r := &Running{docker: d, id: made.ID, done: make(chan struct{})}
	go r.collect(output, console)
	return r, nil
}
