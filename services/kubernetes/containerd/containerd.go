// Package containerd runs containerd, and the system's own containers in it.
//
// containerd is a plain child process of PID 1. etcd and the kubelet are OCI
// images that run in its namespace "system" (Runner); Kubernetes' pods are in
// "k8s.io", where the kubelet puts them. When containerd dies its shims go on,
// and so do the containers: a Runner finds its task again instead of starting a
// second one.
package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/log"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/boot/untrusted"
	"github.com/garboard-os/garboard/services/core/background"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/process"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/services/system/files"
	"google.golang.org/grpc"
)

const (
	// ID of the service.
	ID = "containerd"
	// Socket is where containerd answers, for us and for the kubelet's CRI.
	Socket = "/run/containerd/containerd.sock"
	// Namespace holds the system's own containers.
	Namespace = "system"

	binary = "/usr/bin/containerd"

	// stopBudget is what containerd gets to close its store after SIGTERM. Its
	// containers are stopped by their own services and by the exit funnel.
	stopBudget = 5 * time.Second
	// healthPeriod is short because a killed containerd must be back, and known
	// to be back, within seconds.
	healthPeriod = 2 * time.Second
	dialTimeout  = 5 * time.Second
)

// hidden are the mount points that containerd, and so all containers, don't see: none has anything from there, and a
// pod that mounts the root directory, and is root, could read the keys of the cluster.
var hidden = []string{boot.StateDir, boot.PrivateDir}

// Options are what the service stands on.
type Options struct {
	Mode      boot.Mode
	Store     *resource.Store
	Processes *process.Table
	Logs      *logs.Logs
	Volume    boot.Mounter // for the images on a medium; nil: there are no media
	// Devices has another value after a disk or a medium has come or gone.
	Devices func() string
}

// Containerd is the service and the way to its client.
type Containerd struct {
	Options

	mu     sync.Mutex // guards client
	client *client.Client

	wishes wishes
	pulls  sync.Map // names of images that are being pulled, each with a channel that is closed then
}

// New makes the service; nothing runs yet.
func New(o Options) *Containerd {
	// containerd's client has one logger for the whole process, which would write
	// to PID 1's standard error: the console.
	log.L.Logger.SetOutput(o.Logs.Writer(ID))
	return &Containerd{Options: o}
}

// Service is containerd in the graph.
func (c *Containerd) Service() dag.Service {
	return dag.Service{
		ID:         ID,
		Kind:       dag.Process,
		Prepare:    c.prepare,
		Run:        c.run,
		Health:     &dag.Health{Check: c.healthy, Period: healthPeriod, Timeout: dialTimeout},
		Restart:    dag.RestartAlways,
		StopBudget: stopBudget + time.Second,
	}
}

func (c *Containerd) prepare(ctx context.Context, _ *dag.Handle) error {
	cfg, err := configuration.Config(c.Store)
	if err != nil {
		return err
	}
	// It reads its drop-ins and the authorities only when it starts, and may be
	// started anew because they have just changed.
	if err := files.Await(ctx, c.Store); err != nil {
		return err
	}
	dropIns, err := writeDropIns(dropInsDir, cfg.Machine.Files)
	if err != nil {
		return fmt.Errorf("drop-ins of containerd: %w", err)
	}
	data, err := renderConfig(c.Mode, cfg.Machine.Registries, dropIns)
	if err != nil {
		return fmt.Errorf("render %s: %w", configFile, err)
	}
	for _, dir := range []string{filepath.Dir(configFile), boot.RunDir, boot.CRIConfDir, boot.CNIConfDir} {
		if err := untrusted.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	return errors.Join(writeHosts(hostsDir, cfg.Machine.Registries), untrusted.WriteFile(configFile, data, 0o600))
}

func (c *Containerd) run(ctx context.Context, h *dag.Handle) error {
	out := c.Logs.Writer(ID)
	defer out.Close()
	cmd := exec.Command(binary, "--config", configFile)
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Env = append(os.Environ(), "GOGC=50") // what images need while they are unpacked is free again soon
	cfg, err := configuration.Config(c.Store)
	if err != nil {
		return err
	}
	for k, v := range cfg.Machine.Env {
		cmd.Env = append(cmd.Env, k+"="+v)
	}
	child, err := c.Processes.StartWithout(cmd, hidden...)
	if err != nil {
		return fmt.Errorf("start %s: %w", binary, err)
	}
	if err := c.awaitSocket(ctx, child); err != nil {
		_ = child.Stop(stopBudget) // why it didn't serve says more than how it ended
		return err
	}
	stopImages, err := c.serveImages(ImageSocket)
	if err != nil {
		return errors.Join(err, child.Stop(stopBudget))
	}
	defer stopImages()
	defer c.media(ctx, h)()
	h.Started(fmt.Sprintf("Started process containerd (PID %d)", child.Pid()))
	select {
	case <-child.Done():
		return fmt.Errorf("containerd ended by itself: %w", process.OrClean(child.Wait()))
	case <-ctx.Done():
	}
	_ = child.Stop(stopBudget) // it was asked to end: its status is no news
	return nil
}

// media takes images from media, now and later. What it returns ends that.
func (c *Containerd) media(ctx context.Context, h *dag.Handle) (end func()) {
	if c.Volume == nil {
		return func() {}
	}
	seen := c.Devices()
	c.importBundle(ctx, h)
	return background.Start(ctx, func(ctx context.Context) { watchMedia(ctx, seen, c.Devices, func() { c.importBundle(ctx, h) }) })
}

// awaitSocket returns once containerd serves. It has no deadline of its own: the
// state stays Starting, which the console tells, and an exit ends it.
func (c *Containerd) awaitSocket(ctx context.Context, child *process.Child) error {
	const poll = 50 * time.Millisecond // a boot waits for this: short, and cheap on a unix socket
	for {
		if err := c.healthy(ctx); err == nil {
			return nil
		}
		select {
		case <-child.Done():
			return fmt.Errorf("containerd ended before it served %s: %w", Socket, process.OrClean(child.Wait()))
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(poll):
		}
	}
}

func (c *Containerd) healthy(ctx context.Context) error {
	if _, err := os.Stat(Socket); err != nil {
		return err
	}
	cl, err := c.Client()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	serving, err := cl.IsServing(ctx)
	if err != nil {
		return fmt.Errorf("ask containerd on %s: %w", Socket, err)
	}
	if !serving {
		return fmt.Errorf("containerd on %s doesn't serve yet", Socket)
	}
	return nil
}

// Client is the one connection to containerd. gRPC reconnects it after a
// restart of containerd, so it is made once.
func (c *Containerd) Client() (*client.Client, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.client == nil {
		cl, err := client.New(Socket, client.WithDefaultNamespace(Namespace), client.WithTimeout(dialTimeout),
			client.WithExtraDialOpts([]grpc.DialOption{grpc.WithChainUnaryInterceptor(ofPods)}))
		if err != nil {
			return nil, fmt.Errorf("connect to containerd on %s: %w", Socket, err)
		}
		c.client = cl
	}
	return c.client, nil
}
