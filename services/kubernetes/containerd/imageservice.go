package containerd

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"time"

	client "github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/distribution/reference"
	"github.com/garboard-os/garboard/boot"
	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/services/core/dag"
	"github.com/garboard-os/garboard/services/core/sleep"
	"github.com/garboard-os/garboard/services/system/configuration"
	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/encoding/protowire"
)

// ImageSocket is where the kubelet asks for the images of pods. What it asks goes on to containerd, except for images
// with a rule that is for pods: the node pulls these itself, because containerd's CRI verifies no signatures.
const ImageSocket = boot.RunDir + "/images.sock"

// Methods and fields of the CRI (https://github.com/kubernetes/cri-api/blob/master/pkg/apis/runtime/v1/api.proto). The
// package that has them as Go code would make the program larger by all of the CRI.
const (
	pullImage   = "/runtime.v1.ImageService/PullImage"
	imageStatus = "/runtime.v1.ImageService/ImageStatus"

	pullRequestImage protowire.Number = 1 // ImageSpec
	pullRequestAuth  protowire.Number = 2 // AuthConfig
	pullResponseRef  protowire.Number = 1
	specImage        protowire.Number = 1
	authUsername     protowire.Number = 1
	authPassword     protowire.Number = 2
	authBoth         protowire.Number = 3
	authServer       protowire.Number = 4
	authIdentity     protowire.Number = 5
	statusImage      protowire.Number = 1 // of both the request and the response
	imageID          protowire.Number = 1

	// knownPoll is how often the CRI is asked whether it knows an image, and knownTimeout for how long. It learns of it
	// from an event of containerd.
	knownPoll    = 50 * time.Millisecond
	knownTimeout = time.Minute
)

// serveImages answers on a socket until stop is called.
func (c *Containerd) serveImages(path string) (stop func(), err error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, listener.Close())
	}
	log := c.Logs.Logger(ID)
	server := grpc.NewServer(grpc.WaitForHandlers(true), grpc.ForceServerCodecV2(asItIs{}), grpc.UnknownServiceHandler(func(_ any, kubelet grpc.ServerStream) error {
		return dag.Guard(log, func() error { return c.handleImages(kubelet) })
	}))
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := server.Serve(listener); err != nil {
			log.Error("the kubelet can't ask for images", "socket", path, "err", err)
		}
	}()
	return func() {
		server.Stop()
		<-ended
	}, nil
}

// handleImages answers a question of the kubelet.
func (c *Containerd) handleImages(kubelet grpc.ServerStream) error {
	ctx := kubelet.Context()
	method, _ := grpc.MethodFromServerStream(kubelet)
	var request []byte
	if err := kubelet.RecvMsg(&request); err != nil {
		return err
	}
	cri, err := c.cri()
	if err != nil {
		return err
	}
	if method == pullImage {
		switch id, err := c.pullForPod(ctx, cri, request); {
		case err != nil:
			return err
		case id != "":
			answer := appendField(nil, pullResponseRef, []byte(id))
			return kubelet.SendMsg(&answer)
		}
	}
	return forward(kubelet, cri, method, request)
}

// forward passes a question on, and its answers back.
func forward(kubelet grpc.ServerStream, cri grpc.ClientConnInterface, method string, request []byte) error {
	answers, err := cri.NewStream(kubelet.Context(), &grpc.StreamDesc{ServerStreams: true}, method, grpc.ForceCodecV2(asItIs{}))
	if err != nil {
		return err
	}
	if err := answers.SendMsg(&request); err != nil && !errors.Is(err, io.EOF) { // after EOF, RecvMsg has the reason
		return err
	}
	if err := answers.CloseSend(); err != nil {
		return err
	}
	for {
		var answer []byte
		if err := answers.RecvMsg(&answer); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := kubelet.SendMsg(&answer); err != nil {
			return err
		}
	}
}

func (c *Containerd) cri() (grpc.ClientConnInterface, error) {
	cl, err := c.Client()
	if err != nil {
		return nil, err
	}
	conn, ok := cl.Conn().(grpc.ClientConnInterface)
	if !ok {
		return nil, fmt.Errorf("the connection to containerd is a %T", cl.Conn())
	}
	return conn, nil
}

// podImage is the name that the CRI gives to an image: busybox is docker.io/library/busybox:latest.
func podImage(name string) (string, error) {
	named, err := reference.ParseDockerRef(name)
	if err != nil {
		return "", fmt.Errorf("image %q: %w", name, err)
	}
	return named.String(), nil
}

// known is the name of an image in a namespace.
func known(namespace, name string) string {
	if namespace == PodNamespace {
		if full, err := podImage(name); err == nil {
			return full
		}
	}
	return name
}

// pullForPod pulls an image if a rule for pods' images is for it, and returns its ID in the CRI; "": there is none. The
// pull may take as long as the kubelet waits, as with the CRI: a large image takes hours on a slow line, and bounded
// ends a pull without progress.
func (c *Containerd) pullForPod(ctx context.Context, cri grpc.ClientConnInterface, request []byte) (id string, err error) {
	image, auth, err := parsePull(request)
	if err != nil {
		return "", err
	}
	ref, err := podImage(image)
	cfg, none := configuration.Config(c.Store)
	if err = cmp.Or(err, none); err != nil {
		return "", err
	}
	if rule := cfg.Machine.Images.Rule(ref); rule == nil || !rule.Pods {
		return "", nil
	}
	cl, err := c.Client()
	if err != nil {
		return "", err
	}
	ctx = namespaces.WithNamespace(ctx, PodNamespace)
	// Also if it is there: the kubelet asks for a pull if a pod wants what the registry has now.
	img, err := c.fetch(ctx, cl, ref, origin{hostsDir: hostsDir, bundle: boot.CABundle, machine: cfg.Machine, pod: auth})
	if err == nil {
		err = nameByDigest(ctx, cl, img)
	}
	if err != nil {
		return "", err
	}
	return c.awaitKnown(ctx, cri, img)
}

// nameByDigest gives an image the name with its digest, too, as the CRI does: the status of a pod has that one.
func nameByDigest(ctx context.Context, cl *client.Client, img client.Image) error {
	name, err := reference.ParseNormalizedNamed(img.Name())
	if err != nil {
		return err
	}
	named := images.Image{Name: name.Name() + "@" + img.Target().Digest.String(), Target: img.Target()}
	return create(ctx, cl.ImageService(), cl.ContentStore(), named)
}

// awaitKnown returns an image's ID once the CRI knows the image.
func (c *Containerd) awaitKnown(ctx context.Context, cri grpc.ClientConnInterface, img client.Image) (string, error) {
	of, err := img.Config(ctx)
	if err != nil {
		return "", fmt.Errorf("image %s: %w", img.Name(), err)
	}
	want := of.Digest.String()
	request := appendField(nil, statusImage, appendField(nil, specImage, []byte(img.Name())))
	ctx, cancel := context.WithTimeout(ctx, knownTimeout)
	defer cancel()
	for range sleep.Every(ctx, knownPoll) {
		var answer []byte
		if err := cri.Invoke(ctx, imageStatus, &request, &answer, grpc.ForceCodecV2(asItIs{})); err != nil {
			return "", err
		}
		known, err := field(answer, statusImage)
		if err == nil {
			known, err = field(known, imageID)
		}
		if err != nil || string(known) == want {
			return want, err
		}
	}
	return "", fmt.Errorf("image %s was pulled, and containerd's CRI doesn't know it: %w", img.Name(), ctx.Err())
}

// podAuth is how a pod's pull secret shows who the pod is. A server is the only one that it is for.
type podAuth struct {
	config.RegistryAuth
	server string
}

// login is that for a host.
func (a podAuth) login(host string) (user, secret string) {
	if a.server != "" {
		if u, err := url.Parse(a.server); err != nil || u.Host != host {
			return "", ""
		}
	}
	user, secret, _ = loginOf(&a.RegistryAuth)
	return user, secret
}

func parsePull(request []byte) (image string, auth *podAuth, err error) {
	text := func(message []byte, number protowire.Number) string {
		value, broken := field(message, number)
		err = errors.Join(err, broken)
		return string(value)
	}
	image = text([]byte(text(request, pullRequestImage)), specImage)
	if given := []byte(text(request, pullRequestAuth)); len(given) > 0 {
		auth = &podAuth{server: text(given, authServer), RegistryAuth: config.RegistryAuth{
			Username: text(given, authUsername), Password: config.Secret(text(given, authPassword)),
			Auth: config.Secret(text(given, authBoth)), IdentityToken: config.Secret(text(given, authIdentity)),
		}}
	}
	return image, auth, err
}

// field is the value of a text or a message in a message; nil: there is none.
func field(message []byte, number protowire.Number) (value []byte, err error) {
	for len(message) > 0 {
		n, kind, size := protowire.ConsumeTag(message)
		if size < 0 {
			return nil, protowire.ParseError(size)
		}
		message = message[size:]
		if n == number && kind == protowire.BytesType {
			value, size = protowire.ConsumeBytes(message)
		} else {
			size = protowire.ConsumeFieldValue(n, kind, message)
		}
		if size < 0 {
			return nil, protowire.ParseError(size)
		}
		message = message[size:]
	}
	return value, nil
}

func appendField(message []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(message, number, protowire.BytesType), value)
}

// asItIs doesn't look into messages: they are []byte.
type asItIs struct{}

// Name implements encoding.CodecV2.
func (asItIs) Name() string { return "proto" }

// Marshal implements encoding.CodecV2.
func (asItIs) Marshal(message any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*message.(*[]byte))}, nil
}

// Unmarshal implements encoding.CodecV2.
func (asItIs) Unmarshal(data mem.BufferSlice, message any) error {
	*message.(*[]byte) = data.Materialize()
	return nil
}
