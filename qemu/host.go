package qemu

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/garboard-os/garboard/qemu/exit"
	"github.com/garboard-os/garboard/qemu/network"
	"golang.org/x/sys/unix"
)

const (
	// stopBudget is the time for nodes to power off when the host process is requested to
	// stop. A node promises a minute for its pods to move, and then 30 s for its services.
	// Emulation is slower than that.
	stopBudget         = 95 * time.Second
	stopBudgetEmulated = 120 * time.Second

	// startBudget is for a node to be turned on: its sandbox or QEMU runs within a second
	// or two, and within twenty on a very busy machine.
	startBudget = time.Minute

	// lookPeriod is how often the host process checks that its directory exists. A user may
	// have removed it, and then no command could stop the process.
	lookPeriod = 2 * time.Second

	// A node that ends right after its start, again and again, is started after longer and
	// longer pauses. So its console can be read, and it does not take all of the machine.
	soonEnded   = 20 * time.Second
	restartWait = time.Second
	restartMax  = 30 * time.Second
)

// controlBudget is for the header of a request to the control socket.
const controlBudget = 5 * time.Second

// reportFD is the pipe on which a host process reports to Up.
const reportFD = 3

// report is one line on that pipe. The last one has Ready or Error.
type report struct {
	Step  string `json:"step,omitempty"` // what is done now
	Ready bool   `json:"ready,omitempty"`
	Error string `json:"error,omitempty"`
}

// Host runs the nodes of one cluster until ctx ends or Down requests its end. log is its
// own log.
func Host(ctx context.Context, name string, log *slog.Logger) error {
	if os.Getenv(networkVar) != "" {
		return serveNetwork(ctx, name, log)
	}
	out := reportFile()
	err := host(ctx, name, log, func(r report) { send(out, r) })
	if err != nil {
		send(out, report{Error: err.Error()})
	}
	return err
}

// reportFile returns descriptor 3 if Up has put a pipe there, and nil otherwise.
func reportFile() *os.File {
	var st unix.Stat_t
	if unix.Fstat(reportFD, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
		return nil
	}
	unix.CloseOnExec(reportFD) // otherwise nodes would keep it open
	return os.NewFile(reportFD, "report")
}

func send(out *os.File, r report) {
	if out == nil {
		return
	}
	_ = json.NewEncoder(out).Encode(r) // Up may have ended
	if r.Step == "" {
		out.Close()
	}
}

func host(ctx context.Context, name string, log *slog.Logger, send func(report)) (err error) {
	d, err := dirOf(name)
	if err != nil {
		return err
	}
	plan, err := readPlan(d)
	if err != nil {
		return err
	}
	release, err := hold(d.lock())
	if err != nil {
		return fmt.Errorf("cluster %s runs already: %w", name, err)
	}
	defer release()
	log.Info("cluster starts", "cluster", name, "provisioner", plan.Provisioner)
	h := &hostProcess{plan: plan, log: log, send: send, stop: make(chan struct{})}
	if plan.Provisioner == Docker {
		if h.provisioner, err = newDockerNodes(ctx, plan, d, send); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, h.provisioner.Close()) }()
		return h.run(ctx, d)
	}
	send(report{Step: "creating network " + name})
	nodes, err := plan.lan(d)
	if err != nil {
		return err
	}
	lan, err := network.New(nodes, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lan.Close()) }()
	h.lan = lan
	switch plan.Provisioner {
	case Container:
		h.provisioner, err = newContainers(plan, d, lan, log)
	case QEMU:
		h.provisioner = machines{plan, d, lan}
	default:
		err = fmt.Errorf("provisioner %q of cluster %s isn't known", plan.Provisioner, name)
	}
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.provisioner.Close()) }()

	if plan.balanced() {
		send(report{Step: "creating load balancer"})
	}
	if h.ports, err = openPorts(plan, d, lan, log); err != nil {
		return err
	}
	defer h.ports.close()
	closeMirrors, err := lan.ServeMirrors()
	if err != nil {
		return err
	}
	defer closeMirrors()
	if plan.Provisioner == QEMU && plan.Network.Addr().Is4() {
		send(report{Step: "creating dhcpd"})
		dhcpd, err := lan.ServeDHCP()
		if err != nil {
			return err
		}
		defer dhcpd.Close()
	}
	return h.run(ctx, d)
}

// run starts the nodes, and ends when the cluster must stop.
func (h *hostProcess) run(ctx context.Context, d clusterDir) error {
	if err := h.startAll(ctx); err != nil {
		h.stopAll(0)
		return err
	}
	control, err := listenUnix(d.socket())
	if err != nil {
		h.stopAll(0)
		return err
	}
	server := &http.Server{Handler: h.control(), ReadHeaderTimeout: controlBudget}
	go func() {
		if err := server.Serve(control); !errors.Is(err, http.ErrServerClosed) {
			h.log.Error("control socket", "error", err)
		}
	}()
	h.send(report{Ready: true})
	budget := h.wait(ctx, d, h.plan.stopBudget())
	h.log.Info("cluster stops", "cluster", h.plan.Name, "budget", budget)
	h.stopAll(budget)
	server.Close()
	return nil
}

// wait blocks until the cluster must stop, and returns the nodes' budget for that. The
// budget is otherwise if ctx has ended.
func (h *hostProcess) wait(ctx context.Context, d clusterDir, otherwise time.Duration) time.Duration {
	look := time.NewTicker(lookPeriod)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			h.askStop(otherwise)
		case <-h.stop:
			return h.budget
		case <-look.C:
			if _, err := os.Stat(d.plan()); errors.Is(err, fs.ErrNotExist) {
				h.log.Warn("the cluster's directory was removed")
				h.askStop(0)
			}
		}
	}
}

// hostProcess is the state of Host.
type hostProcess struct {
	plan        Plan
	log         *slog.Logger
	lan         *network.LAN // nil: the network is Docker's
	provisioner provisioner
	ports       *ports // nil: as above
	nodes       []*node
	send        func(report)

	stopOnce sync.Once
	budget   time.Duration // set before stop is closed
	stop     chan struct{} // closed once the process is to end
}

// stops reports whether the process is stopping. Nodes may still run then, but will be
// stopped.
func (h *hostProcess) stops() bool {
	select {
	case <-h.stop:
		return true
	default:
		return false
	}
}

// askStop requests the end of the process, with this budget for the nodes.
func (h *hostProcess) askStop(budget time.Duration) {
	h.stopOnce.Do(func() {
		h.budget = budget
		close(h.stop)
	})
}

// startAll starts every node once, so that their errors are reported now.
func (h *hostProcess) startAll(ctx context.Context) error {
	for i, n := range h.plan.Nodes {
		if i == 0 {
			h.send(report{Step: "creating control plane nodes"})
		} else if n.Type == "worker" && h.plan.Nodes[i-1].Type != "worker" {
			h.send(report{Step: "creating worker nodes"})
		}
		node := &node{Node: n, log: h.log.With("node", n.Name), provisioner: h.provisioner, pause: restartWait, quit: make(chan struct{}), wake: make(chan struct{}, 1), state: exit.Off.String(), since: time.Now()}
		if !n.Later {
			if err := node.start(ctx, false); err != nil {
				return err
			}
		}
		h.nodes = append(h.nodes, node)
		node.done.Go(node.supervise)
	}
	return nil
}

// stopAll stops all nodes at the same time, and cuts the power of those that are still on
// after the budget.
func (h *hostProcess) stopAll(budget time.Duration) {
	var all sync.WaitGroup
	for _, n := range h.nodes {
		all.Go(func() { n.shutdown(budget) })
	}
	all.Wait()
}

func (h *hostProcess) node(name string) (*node, error) {
	for _, n := range h.nodes {
		if n.Name == name {
			return n, nil
		}
	}
	return nil, fmt.Errorf("cluster %s has no node %q", h.plan.Name, name)
}

// ReadLast returns the end of a file, for messages; "" if it can't be read.
func ReadLast(path string, size int64) string {
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > size {
		_, _ = f.Seek(-size, io.SeekEnd)
	}
	text, _ := io.ReadAll(f)
	return string(text)
}
