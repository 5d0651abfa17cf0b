//go:build e2e

package containerd

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/logs"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
	"github.com/garboard-os/garboard/tools/testing/eventually"
)

var update = flag.Bool("update", false, "write what the kubelet asks for to testdata")

// recorder is a container runtime that knows no image, starts no container, and keeps what it is asked to pull.
type recorder struct {
	mu    sync.Mutex // guards pulls
	pulls map[string][]byte
}

// The numbers of fields in what the runtime says
// (https://github.com/kubernetes/cri-api/blob/master/pkg/apis/runtime/v1/api.proto).
func (r *recorder) answer(method string, request []byte) ([]byte, error) {
	text := func(number protowire.Number, value string) []byte { return appendField(nil, number, []byte(value)) }
	yes := func(message []byte, number protowire.Number) []byte {
		return protowire.AppendVarint(protowire.AppendTag(message, number, protowire.VarintType), 1)
	}
	switch method {
	case "/runtime.v1.RuntimeService/Version":
		return slices.Concat(text(1, "0.1.0"), text(2, "recorder"), text(3, "1.0.0"), text(4, "v1")), nil
	case "/runtime.v1.RuntimeService/Status": // conditions
		both := slices.Concat(appendField(nil, 1, yes(text(1, "RuntimeReady"), 2)), appendField(nil, 1, yes(text(1, "NetworkReady"), 2)))
		return appendField(nil, 1, both), nil
	case "/runtime.v1.RuntimeService/RuntimeConfig": // the driver of cgroups is cgroupfs
		return appendField(nil, 1, yes(nil, 1)), nil
	case "/runtime.v1.RuntimeService/RunPodSandbox":
		return text(1, "sandbox"), nil
	case "/runtime.v1.RuntimeService/PodSandboxStatus":
		metadata := slices.Concat(text(1, "pod"), text(2, "uid"), text(3, "default"))
		// made at that time
		return appendField(nil, 1, slices.Concat(text(1, "sandbox"), appendField(nil, 2, metadata), yes(nil, 4))), nil
	case pullImage:
		image, _, err := parsePull(request)
		r.mu.Lock()
		defer r.mu.Unlock()
		r.pulls[image] = bytes.Clone(request)
		return nil, errors.Join(err, status.Error(codes.NotFound, "it is only recorded"))
	}
	return nil, nil // an empty list, or nothing
}

func (r *recorder) serve(path string) (*grpc.Server, error) {
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	server := grpc.NewServer(grpc.ForceServerCodecV2(asItIs{}), grpc.UnknownServiceHandler(func(_ any, kubelet grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(kubelet)
		var request []byte
		if err := kubelet.RecvMsg(&request); err != nil {
			return err
		}
		answer, err := r.answer(method, request)
		if err != nil {
			return err
		}
		return kubelet.SendMsg(&answer)
	}))
	go server.Serve(listener) //nolint:errcheck // the kubelet sees it
	return server, nil
}

// The static pods whose images the kubelet pulls, by the name of the request in testdata. The kubelet has a login for
// the second registry.
var podImages = map[string]string{"pull": "plain.test/site/pod:1", "pull-with-login": "login.test/site/pod:1"}

// The kubelet of the release asks for the images of static pods, through the node's image service. What it asks for is
// in testdata, where unit tests read it:
// `go test -tags=e2e -run TestRealPulls ./services/kubernetes/containerd -update`, with the kubelet's folder in
// GARBOARD_COMPONENTS, writes it. A kubelet that sends other fields than those in testdata is noticed here.
func TestRealPulls(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("the kubelet needs root")
	}
	dir := t.TempDir()
	r := &recorder{pulls: map[string][]byte{}}
	runtime, images := filepath.Join(dir, "cri.sock"), filepath.Join(dir, "images.sock")
	server, err := r.serve(runtime)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("unix://"+runtime, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	store := resource.NewStore()
	if err := configuration.Configs.Put(store.As(configuration.ID), configuration.ConfigID, &config.Config{}); err != nil {
		t.Fatal(err)
	}
	c := &Containerd{Options: Options{Store: store, Logs: logs.New(os.Stderr)}}
	if c.client, err = client.NewWithConn(conn); err != nil {
		t.Fatal(err)
	}
	stop, err := c.serveImages(images)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	runKubelet(t, dir, runtime, images)
	eventually.That(t, time.Minute, "the kubelet asks for the images", func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if len(r.pulls) != len(podImages) {
			return fmt.Errorf("it has asked for %q", slices.Collect(maps.Keys(r.pulls)))
		}
		return nil
	})
	for name, image := range podImages {
		file := filepath.Join("testdata", name+".pb")
		if *update {
			if err := errors.Join(os.MkdirAll("testdata", 0o755), os.WriteFile(file, r.pulls[image], 0o644)); err != nil {
				t.Fatal(err)
			}
		}
		kept, err := os.ReadFile(file)
		if got, want := fieldsOf(t, r.pulls[image]), fieldsOf(t, kept); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: the kubelet sends the fields %v, and testdata has %v (-update writes it): %v", image, got, want, err)
		}
	}
}

// fieldsOf are the numbers of the fields of a request, and of those of its image and its login.
func fieldsOf(t *testing.T, request []byte) (numbers []string) {
	t.Helper()
	each := func(message []byte, visit func(n protowire.Number, value []byte)) {
		for len(message) > 0 {
			n, kind, size := protowire.ConsumeField(message)
			if size < 0 {
				t.Fatal(protowire.ParseError(size))
			}
			var value []byte
			if kind == protowire.BytesType {
				_, _, tag := protowire.ConsumeTag(message)
				value, _ = protowire.ConsumeBytes(message[tag:])
			}
			visit(n, value)
			message = message[size:]
		}
	}
	each(request, func(n protowire.Number, value []byte) {
		numbers = append(numbers, fmt.Sprint(n))
		if n == pullRequestImage || n == pullRequestAuth {
			each(value, func(inner protowire.Number, _ []byte) { numbers = append(numbers, fmt.Sprintf("%d.%d", n, inner)) })
		}
	})
	slices.Sort(numbers)
	return slices.Compact(numbers)
}

// apart starts a program in namespaces of its own. What it does to the kernel's parameters is done to a copy.
const apart = `set -e
mount --make-rprivate /
mount -t proc proc /proc
for of in kernel vm; do
  cp -r /proc/sys/$of "$1" 2>/dev/null || true
  mount --bind "$1/$of" /proc/sys/$of
done
shift
exec "$@"
`

// runKubelet runs the kubelet alone, without an API server, until the test ends.
func runKubelet(t *testing.T, dir, runtime, images string) {
	t.Helper()
	put := func(path, content string) string {
		path = filepath.Join(dir, path)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o600)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, image := range podImages {
		put("pods/"+name+".json", fmt.Sprintf(`{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": %q}, "spec": {"hostNetwork": true, "containers": [{"name": "c", "image": %q}]}}`, name, image))
	}
	login := base64.StdEncoding.EncodeToString([]byte("u:p"))
	put("root/config.json", fmt.Sprintf(`{"auths": {"login.test": {"auth": %q}}}`, login))
	settings, err := json.Marshal(map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"staticPodPath": filepath.Join(dir, "pods"), "fileCheckFrequency": "1s", "podLogsDir": filepath.Join(dir, "logs"),
		"containerRuntimeEndpoint": "unix://" + runtime, "imageServiceEndpoint": "unix://" + images,
		"enableServer": false, "healthzPort": 0, "authentication": map[string]any{"webhook": map[string]any{"enabled": false}}, "authorization": map[string]any{"mode": "AlwaysAllow"},
		"cgroupDriver": "cgroupfs", "cgroupsPerQOS": false, "enforceNodeAllocatable": []string{}, "failCgroupV1": false, "failSwapOn": false,
		"localStorageCapacityIsolation": false, "imageGCHighThresholdPercent": 100, "resolvConf": "",
	})
	if err != nil {
		t.Fatal(err)
	}
	program, err := kubeletProgram()
	if err != nil {
		t.Fatal(err)
	}
	copies := filepath.Join(dir, "sys")
	if err := os.Mkdir(copies, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "sh", "-c", apart, "sh", copies, program,
		"--config="+put("kubelet.json", string(settings)), "--root-dir="+filepath.Join(dir, "root"), "--cert-dir="+filepath.Join(dir, "pki"), "--hostname-override=n1")
	const own = syscall.CLONE_NEWNS | syscall.CLONE_NEWPID | syscall.CLONE_NEWNET | syscall.CLONE_NEWUTS | syscall.CLONE_NEWIPC
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: own, Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // it may have ended
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the kubelet:\n%s", &out)
		}
	})
}

// kubeletProgram is the kubelet of this checkout. `make e2e` sets the variable to the folders with programs, once they
// are built.
func kubeletProgram() (string, error) {
	for _, dir := range filepath.SplitList(os.Getenv("GARBOARD_COMPONENTS")) {
		if path := filepath.Join(dir, "kubelet"); exec.Command("test", "-x", path).Run() == nil {
			return path, nil
		}
	}
	return "", errors.New("GARBOARD_COMPONENTS names no folder with the kubelet: run this test with `make e2e`")
}
