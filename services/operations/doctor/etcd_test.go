package doctor

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"testing"

	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/kubernetes/etcd"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
)

// Guide: etcd is not running on bootstrap node.
func TestEtcdNotRunning(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		n.config.Cluster.Etcd.ExtraArgs = config.Args{"no-such-flag": {"1"}}
		services["etcd"].Run = n.ends("etcd", "etcd-unknown-flag.log")
		withoutEtcd(n, services)
	})
	n.finds("etcd-not-running", failure, `cluster.etcd.extraArgs has no-such-flag: "1"`, "flag provided but not defined", "status 1")
	n.finds("static-pods-not-generated", info, "Follows from etcd-not-running", "garboard-kube-apiserver.yaml", boot.StaticPodsDir)
	n.finds("apiserver-not-running", info, "Follows from etcd-not-running")
	n.finds("endpoint-not-answering", info, "Follows from etcd-not-running")
	for i, f := range n.diagnose() {
		if i == 0 && f.Id != "etcd-not-running" || i > 0 && f.Severity != info {
			t.Errorf("finding %d:\n%s", i, show(f))
		}
	}
}

func TestEtcdWithoutLeader(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		withoutEtcd(n, services)
		n.etcd.members = append(n.etcd.members, &pb.Member{Name: "n2", PeerURLs: []string{"https://10.5.0.3:2380"}}, &pb.Member{Name: "n3", PeerURLs: []string{"https://10.5.0.4:2380"}})
	})
	n.finds("etcd-not-running", info, "no leader")
	n.later(startTime)
	n.finds("etcd-not-running", failure, "no leader", "linearizable_read failed", "10.5.0.4:2380")
}

// S-355, guide: etcd is not running on non-bootstrap control plane node.
func TestS355EtcdWaitsForBootstrap(t *testing.T) {
	t.Parallel()
	n := start(t, config.ControlPlane, func(n *node, services map[string]*dag.Service) {
		n.must(os.MkdirAll(n.path(boot.EtcdDataDir), 0o700))
		for _, s := range n.others {
			s.set(http.StatusServiceUnavailable, "")
		}
		services["etcd"].Prepare = func(ctx context.Context, h *dag.Handle) error {
			h.EventOf(etcd.NoCluster, "Waiting for bootstrap, or for a control plane to join at https://10.5.0.2:6443")
			<-ctx.Done()
			return ctx.Err()
		}
		withoutEtcd(n, services)
	})
	n.finds("etcd-waits-for-bootstrap", failure, "/var/lib/etcd is empty", "controlplane", "exactly one", "gbctl -n ADDRESS bootstrap")
	n.finds("etcd-not-running", info, "Follows from etcd-waits-for-bootstrap")
	n.finds("static-pods-not-generated", info, "Follows from etcd-waits-for-bootstrap")
	n.finds("scheduler-not-running", info, "Follows from etcd-waits-for-bootstrap")
	// While the cluster may still be coming up it is what one expects to see.
	n.age.Store(0)
	n.finds("etcd-waits-for-bootstrap", info, "/var/lib/etcd is empty")

	start(t, config.ControlPlane).healthy()
}

// Guide: booting on a disk with a previous installation; S-225.
func TestS225EtcdForeignData(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		withoutEtcd(n, services)
		services["etcd"].Run = func(ctx context.Context, h *dag.Handle) error {
			data, err := os.ReadFile("testdata/etcd-foreign.log")
			n.must(err)
			fmt.Fprintf(n.logs.Writer("etcd"), "%s", data)
			h.Started("Started task etcd (PID 42) for container etcd")
			<-ctx.Done()
			return nil
		}
	})
	n.finds("etcd-foreign-data", failure, "127.0.0.9:33380", "10.5.0.2", "recovered/added member from store")
	n.finds("etcd-not-running", info, "Follows from etcd-foreign-data")
}

// The service sees it by itself, and doesn't start.
func TestS225EtcdStaysAwayFromForeignData(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		services["etcd"].Prepare = func(ctx context.Context, h *dag.Handle) error {
			h.EventOf(etcd.ForeignData, "some text: member 2 of cluster 1")
			<-ctx.Done()
			return ctx.Err()
		}
		withoutEtcd(n, services)
	})
	n.finds("etcd-foreign-data", failure, "member 2 of cluster 1", "gbctl -n ADDRESS reset --graceful=false --system-labels-to-wipe EPHEMERAL --reboot")
	n.finds("etcd-not-running", info, "Follows from etcd-foreign-data")
}

// A node that lost its data, while the others are away, isn't told to begin anew.
func TestEtcdLostItsData(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init, func(n *node, services map[string]*dag.Service) {
		n.must(os.MkdirAll(n.path(boot.EtcdDataDir), 0o700))
		for _, s := range n.others {
			s.set(http.StatusServiceUnavailable, "")
		}
		services["etcd"].Prepare = func(ctx context.Context, h *dag.Handle) error {
			h.EventOf(etcd.DataLost, "some text: 10.5.0.3")
			<-ctx.Done()
			return ctx.Err()
		}
		withoutEtcd(n, services)
	})
	n.finds("etcd-waits-for-bootstrap", failure, "10.5.0.3", "bootstrap --recover-from")
}

// The data of another cluster at the same address: etcd is fine, and the API server is
// not. The lines are real ones.
func TestS225SecretsOfAnotherCluster(t *testing.T) {
	t.Parallel()
	const about = `2026-11-21T15:55:40.390698254Z stderr F E1121 15:55:40.389777       1 cacher.go:500] cacher (secrets): unexpected ListAndWatch error: failed to list `
	for _, said := range []string{
		`*core.Secret: unable to transform key "/registry/secrets/kube-system/bootstrap-token-zudtb5": output array was not large enough for encryption; reinitializing...`,
		// Since Kubernetes 1.37.
		`<unspecified>: failed to read one or more secrets from the storage: StorageError: corrupt object, Code: 7, Key: /registry/secrets/kube-system/bootstrap-token-zudtb5, ResourceVersion: 0, ` +
			`AdditionalErrorMsg: data from the storage is not transformable revision=0: output array was not large enough for encryption; reinitializing...`,
	} {
		n := start(t, config.Init, func(n *node, _ map[string]*dag.Service) {
			n.write(about+said+"\n", "var/log/pods/kube-system_kube-apiserver-n1_0123/kube-apiserver/0.log")
		})
		n.healthy() // it has been read since
		n.api.fail("/readyz", func(w http.ResponseWriter) {
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, "[+]ping ok\n[-]informer-sync failed: reason withheld\nreadyz check failed\n")
		})
		n.finds("etcd-foreign-data", failure, "cluster.secret", "bootstrap-token-zudtb5", "[-]informer-sync failed")
		n.finds("apiserver-not-running", info, "Follows from etcd-foreign-data")
	}
}

func TestEtcdNoSpace(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	n.etcd.alarms = []pb.AlarmType{pb.AlarmType_NOSPACE}
	n.finds("etcd-no-space", failure, "NOSPACE", "quota-backend-bytes")
	n.etcd.alarms = nil
	n.healthy()
}

// S-220.
func TestS220EvenMembers(t *testing.T) {
	t.Parallel()
	n := start(t, config.Init)
	second := &pb.Member{Name: "n2", PeerURLs: []string{"https://10.5.0.3:2380"}, IsLearner: true}
	n.etcd.members = append(n.etcd.members, second)
	n.healthy() // a learner doesn't vote
	n.etcd.members[1].IsLearner = false
	n.finds("etcd-even-members", warning, "2 members", "10.5.0.3:2380")
	n.etcd.members = append(n.etcd.members, &pb.Member{Name: "n3"})
	n.healthy()
}
