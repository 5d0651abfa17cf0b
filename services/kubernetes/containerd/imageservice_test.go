package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/status"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/resource"
	"github.com/garboard-os/garboard/services/system/configuration"
)

// kubeletAsked is a request of a real kubelet, which has pulled an image for a static pod. TestRealPulls has recorded
// it, and says how.
func kubeletAsked(t *testing.T, name string) []byte {
	t.Helper()
	request, err := os.ReadFile(filepath.Join("testdata", name+".pb"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.Clip(request)
}

func TestPullOfTheKubeletIsRead(t *testing.T) {
	t.Parallel()
	const plainImage, loginImage = "plain.test/site/pod:1", "login.test/site/pod:1"
	plain, login := kubeletAsked(t, "pull"), kubeletAsked(t, "pull-with-login")
	loginIs := &podAuth{RegistryAuth: config.RegistryAuth{Username: "u", Password: "p"}}
	for _, c := range []struct {
		request []byte
		image   string
		want    *podAuth
	}{
		{plain, plainImage, nil},
		{login, loginImage, loginIs},
		// The kubelet has no login with these fields. Others who speak the CRI have.
		{appendField(plain, pullRequestAuth, nil), plainImage, nil},
		{appendField(plain, pullRequestAuth, appendField(nil, authServer, []byte("https://r.test/v1/"))), plainImage, &podAuth{server: "https://r.test/v1/"}},
		{appendField(plain, pullRequestAuth, appendField(nil, authIdentity, []byte("t"))), plainImage, &podAuth{RegistryAuth: config.RegistryAuth{IdentityToken: "t"}}},
		// Fields of later versions, of other kinds too, are skipped.
		{append([]byte{0x48, 0x07}, appendField(login, 9, []byte("x"))...), loginImage, loginIs},
	} {
		image, got, err := parsePull(c.request)
		if err != nil || image != c.image {
			t.Errorf("%q: %q, %v", c.request, image, err)
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(podAuth{})); diff != "" {
			t.Errorf("%q: %s", c.request, diff)
		}
	}
	for n := 1; n < len(login); n++ {
		if image, _, err := parsePull(login[:n]); err == nil && image != loginImage { // it may end between two fields
			t.Errorf("a request that is cut off after %d bytes is for %q", n, image)
		}
	}
}

func TestPullSecretIsForItsServer(t *testing.T) {
	t.Parallel()
	both := config.RegistryAuth{Auth: "dTpw"}
	for _, c := range []struct {
		auth         podAuth
		user, secret string
	}{
		{podAuth{RegistryAuth: both}, "u", "p"},
		{podAuth{RegistryAuth: both, server: "https://r.test/v1/"}, "u", "p"},
		{podAuth{RegistryAuth: both, server: "https://other.test"}, "", ""},
		{podAuth{RegistryAuth: both, server: "://"}, "", ""},
		{podAuth{RegistryAuth: config.RegistryAuth{IdentityToken: "t"}}, "", "t"},
		{podAuth{}, "", ""},
	} {
		if user, secret := c.auth.login("r.test"); user != c.user || secret != c.secret {
			t.Errorf("%+v: %q, %q", c.auth, user, secret)
		}
	}
}

// noLeases are those of a containerd that makes none.
type noLeases struct {
	leases.Manager
	limited bool // whether the pull that asked has a deadline
}

var errNoLease = errors.New("no lease")

func (l *noLeases) Create(ctx context.Context, _ ...leases.Opt) (leases.Lease, error) {
	_, l.limited = ctx.Deadline()
	return leases.Lease{}, errNoLease
}

// An image of a pod whose signature is good is pulled without a limit of the whole time: it may be large, and the line
// slow.
func TestPullForAPodHasNoDeadline(t *testing.T) {
	t.Parallel()
	key, image := newKey(t), newSignedImage()
	manifest := image.add(t, ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest})
	image.bundle(t, key, manifest.Digest)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		of, kind := digest.Digest(path.Base(r.URL.Path)), ocispec.MediaTypeImageManifest
		if of == "1" {
			of = manifest.Digest
		}
		text := image.parts[of]
		if strings.Contains(r.URL.Path, "/referrers/") {
			text, _ = json.Marshal(ocispec.Index{Manifests: image.referring})
			kind = ocispec.MediaTypeImageIndex
		}
		if text == nil { // it has no signature with a tag
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", kind)
		w.Header().Set("Docker-Content-Digest", of.String())
		w.Write(text)
	}))
	defer server.Close()
	name := strings.TrimPrefix(server.URL, "http://") + "/team/image:1"
	var cfg config.Config
	cfg.Machine.Images.Verify = []config.ImageRule{{Prefix: "127.0.0.1:", Pods: true, Keys: []config.PEM{public(t, key.Public())}}}
	store := resource.NewStore()
	if err := configuration.Configs.Put(store.As(configuration.ID), configuration.ConfigID, &cfg); err != nil {
		t.Fatal(err)
	}
	all := &noLeases{limited: true}
	fake, err := client.New("", client.WithServices(client.WithLeasesService(all)))
	if err != nil {
		t.Fatal(err)
	}
	c := &Containerd{Options: Options{Store: store}, client: fake}
	request := appendField(nil, pullRequestImage, appendField(nil, specImage, []byte(name)))
	if _, err := c.pullForPod(t.Context(), nil, request); !errors.Is(err, errNoLease) || all.limited {
		t.Errorf("limited %v: %v", all.limited, err)
	}
}

// forgetful is a CRI that knows no image.
type forgetful struct{ grpc.ClientConnInterface }

func (forgetful) Invoke(context.Context, string, any, any, ...grpc.CallOption) error { return nil }

// pulled is an image that is there.
type pulled struct{ client.Image }

func (pulled) Name() string { return testImage }

func (pulled) Config(context.Context) (d ocispec.Descriptor, err error) { d.Digest = aDigest; return }

// A CRI that never learns of an image doesn't keep the kubelet waiting for good.
func TestImageThatTheCRIDoesNotKnow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		if _, err := new(Containerd).awaitKnown(t.Context(), forgetful{}, pulled{}); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "containerd's CRI doesn't know it") {
			t.Error(err)
		}
	})
}

// The service behind the socket is a real one of gRPC, with single answers, with many, and with errors.
func TestQuestionsOfTheKubeletAreForwarded(t *testing.T) {
	t.Parallel()
	serve := func(name string, server *grpc.Server) *grpc.ClientConn {
		path := filepath.Join(t.TempDir(), name)
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		go server.Serve(listener) //nolint:errcheck // the client sees it
		t.Cleanup(server.Stop)
		conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return conn
	}
	real, checks := grpc.NewServer(), health.NewServer()
	grpc_health_v1.RegisterHealthServer(real, checks)
	cri := serve("cri", real)
	front := serve("front", grpc.NewServer(grpc.ForceServerCodecV2(asItIs{}), grpc.UnknownServiceHandler(func(_ any, kubelet grpc.ServerStream) error {
		method, _ := grpc.MethodFromServerStream(kubelet)
		var request []byte
		if err := kubelet.RecvMsg(&request); err != nil {
			return err
		}
		return forward(kubelet, cri, method, request)
	})))

	asked := grpc_health_v1.NewHealthClient(front)
	checks.SetServingStatus("a", grpc_health_v1.HealthCheckResponse_NOT_SERVING)
	if answer, err := asked.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "a"}); err != nil || answer.Status != grpc_health_v1.HealthCheckResponse_NOT_SERVING {
		t.Error(answer, err)
	}
	if _, err := asked.Check(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "b"}); status.Code(err) != codes.NotFound {
		t.Error(err)
	}
	watch, err := asked.Watch(t.Context(), &grpc_health_v1.HealthCheckRequest{Service: "a"})
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []grpc_health_v1.HealthCheckResponse_ServingStatus{grpc_health_v1.HealthCheckResponse_NOT_SERVING, grpc_health_v1.HealthCheckResponse_SERVING} {
		if answer, err := watch.Recv(); err != nil || answer.Status != want {
			t.Fatal(answer, err)
		}
		checks.SetServingStatus("a", grpc_health_v1.HealthCheckResponse_SERVING)
	}
	if err := front.Invoke(t.Context(), "/runtime.v1.ImageService/StreamImages", &grpc_health_v1.HealthCheckRequest{}, &grpc_health_v1.HealthCheckResponse{}); status.Code(err) != codes.Unimplemented {
		t.Error(err)
	}
}

// An image that a person pulls for pods has the name that the kubelet will ask for.
func TestNamesOfImagesForPods(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"nginx":                          "docker.io/library/nginx:latest",
		"nginx:1.28":                     "docker.io/library/nginx:1.28",
		"example/agent:v1":               "docker.io/example/agent:v1",
		"registry.k8s.io/pause:3.10":     "registry.k8s.io/pause:3.10",
		"10.0.0.1:5000/agent@" + aDigest: "10.0.0.1:5000/agent@" + aDigest,
	} {
		if got, err := podImage(name); got != want || err != nil {
			t.Errorf("%s: %s, %v; want %s", name, got, err, want)
		}
	}
	if got, err := podImage("Nginx"); err == nil {
		t.Errorf("Nginx is %s", got)
	}
}

const aDigest = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
