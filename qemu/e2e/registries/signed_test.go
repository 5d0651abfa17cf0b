//go:build e2e && long

package registries

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/garboard-os/garboard/config"
	"github.com/garboard-os/garboard/qemu"
	"github.com/garboard-os/garboard/qemu/e2e/e2etest"
	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// cosign builds cosign, and returns what runs it in a directory with the keys.
func cosign(t *testing.T) (keys string, run func(args ...string)) {
	t.Helper()
	keys = t.TempDir()
	program := filepath.Join(keys, "cosign")
	build := exec.CommandContext(t.Context(), "go", "build", "-mod=readonly", "-o", program, "github.com/sigstore/cosign/v2/cmd/cosign")
	build.Dir = "cosign"
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build cosign: %v: %s", err, out)
	}
	return keys, func(args ...string) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), program, args...)
		cmd.Dir, cmd.Env = keys, append(os.Environ(), "COSIGN_PASSWORD=", "HOME="+keys)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("cosign %v: %v: %s", args, err, out)
		}
	}
}

// digestOf is what a registry has under a name.
func digestOf(t *testing.T, ref string) string {
	t.Helper()
	parsed, err := name.ParseReference(ref)
	if err != nil {
		t.Fatal(err)
	}
	head, err := remote.Head(parsed)
	if err != nil {
		t.Fatal(err)
	}
	return head.Digest.String()
}

// identity is who the certificate of a signer is for.
const identity = "https://build.test/site"

// signer writes an authority, a certificate of it for the identity, and the key of that.
func signer(t *testing.T, dir string) (authority []byte) {
	t.Helper()
	uri, err := url.Parse(identity)
	if err != nil {
		t.Fatal(err)
	}
	issue := func(of x509.Certificate, by *x509.Certificate, signs *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		if by == nil {
			by, signs = &of, key
		}
		of.NotBefore, of.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
		der, err := x509.CreateCertificate(rand.Reader, &of, by, key.Public(), signs)
		if err != nil {
			t.Fatal(err)
		}
		made, err := x509.ParseCertificate(der)
		if err != nil {
			t.Fatal(err)
		}
		return made, key
	}
	ca, caKey := issue(x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "signers"}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}, nil, nil)
	leaf, leafKey := issue(x509.Certificate{
		SerialNumber: big.NewInt(2), URIs: []*url.URL{uri}, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageCodeSigning},
	}, ca, caKey)
	private, err := x509.MarshalPKCS8PrivateKey(leafKey)
	if err != nil {
		t.Fatal(err)
	}
	authority = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw})
	for name, text := range map[string][]byte{
		"ca.pem": authority, "leaf.pem": pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: leaf.Raw}),
		"leaf-plain.key": pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return authority
}

// A rule accepts an image that a real cosign has signed with the key, or with a certificate for the identity, and
// refuses an image without a signature, and one that somebody else has signed. Signatures have both formats of cosign.
// Rules are for the images of the kubelet, of etcd and, if they say so, of pods.
func TestSignedImages(t *testing.T) {
	const signed, certified, unsigned, foreign, stated = "site/kubelet", "site/certified", "site/unsigned", "site/foreign", "site/stated"
	dir := t.TempDir()
	from := e2etest.Built(t, qemu.Container).Layout
	for _, repository := range []string{signed, certified, unsigned, foreign, stated} {
		// Their digests differ, so that a signature is for one of them.
		store(t, dir, from, map[string]string{config.DefaultKubeletImage: repository + ":1"}, ownLayerOf(t))
	}
	const etcd, refusedEtcd = "site/etcd", "site/refused-etcd"
	for _, repository := range []string{etcd, refusedEtcd} {
		store(t, dir, from, map[string]string{config.DefaultEtcdImage: repository + ":1"}, ownLayerOf(t))
	}
	const pod, refusedPod = "site/pod", "site/refused-pod"
	for _, repository := range []string{pod, refusedPod} {
		store(t, dir, from, map[string]string{config.DefaultPauseImage: repository + ":1"}, ownLayerOf(t))
	}
	const scheduler, refusedScheduler = "site/scheduler", "site/refused-scheduler"
	for _, repository := range []string{scheduler, refusedScheduler} {
		store(t, dir, from, map[string]string{config.DefaultSchedulerImage: repository + ":1"}, ownLayerOf(t))
	}
	well := localhost(t)
	serve(t, nil, dir, well, nil)
	keys, run := cosign(t)
	for key, repository := range map[string]string{"site": signed, "other": foreign} {
		run("generate-key-pair", "--output-key-prefix", key)
		run("sign", "--key", key+".key", "--tlog-upload=false", "--allow-http-registry", "--yes", well+"/"+repository+"@"+digestOf(t, well+"/"+repository+":1"))
	}
	bundle := []string{"sign", "--new-bundle-format", "--tlog-upload=false", "--allow-http-registry", "--yes"}
	for _, repository := range []string{stated, etcd, pod, scheduler} {
		run(append(bundle, "--key", "site.key", well+"/"+repository+"@"+digestOf(t, well+"/"+repository+":1"))...)
	}
	authority := signer(t, keys)
	run("import-key-pair", "--key", "leaf-plain.key", "--output-key-prefix", "leaf")
	run("sign", "--key", "leaf.key", "--certificate", "leaf.pem", "--certificate-chain", "ca.pem", "--tlog-upload=false", "--allow-http-registry", "--yes",
		well+"/"+certified+"@"+digestOf(t, well+"/"+certified+":1"))
	public, err := os.ReadFile(filepath.Join(keys, "site.pub"))
	if err != nil {
		t.Fatal(err)
	}

	c, m := e2etest.Ready(t, "signed", qemu.Container)
	inside, host := c.Network(), gateway+":5082"
	serve(t, inside, dir, host, nil)
	patch := func(text string) {
		t.Helper()
		c.Gbctl("-n", c.Node(), "patch", "mc", "-p", text)
	}
	patch(fmt.Sprintf("machine: {registries: {mirrors: {signed.test: {endpoints: [\"http://%s\"]}}}, images: {verify: [{prefix: signed.test/, keys: [%s]}]}}",
		host, base64.StdEncoding.EncodeToString(public)))
	service := "kubelet"
	takes := func(repository string) {
		t.Helper()
		patch(map[string]string{"kubelet": "machine", "etcd": "cluster"}[service] + ": {" + service + ": {image: signed.test/" + repository + ":1}}")
	}
	says := func(repository, want string) {
		t.Helper()
		takes(repository)
		c.Eventually(pullBudget, repository+": "+want, func() error {
			out, err := c.TryGbctl("-n", c.Node(), "service", service)
			lines := strings.Split(out, "\n")
			if err == nil && !(strings.Contains(out, "signed.test/"+repository) && slices.ContainsFunc(lines, func(l string) bool { return strings.Contains(l, want) })) {
				err = errors.New(out)
			}
			return err
		})
		m.Reached(repository + ": " + want)
	}
	const refused = "isn't signed as machine.images.verify demands for signed.test/: "
	says(unsigned, refused+"it has no signature of cosign")
	says(foreign, refused+"a signature is of another key")
	rule := func(identity string) {
		patch(fmt.Sprintf("machine: {images: {verify: [{prefix: signed.test/site/certified, authority: %s, identity: %q}, {prefix: signed.test/, keys: [%s]}]}}",
			base64.StdEncoding.EncodeToString(authority), identity, base64.StdEncoding.EncodeToString(public)))
	}
	rule("https://build.test/other")
	says(certified, "its certificate is that of "+identity)
	rule(identity)
	runs := func(repository string) {
		t.Helper()
		c.Eventually(pullBudget, service+" runs from "+repository, func() error {
			out, err := c.TryGbctl("-n", c.Node(), "containers")
			if err == nil && !strings.Contains(out, "signed.test/"+repository) {
				err = errors.New(out)
			}
			return err
		})
	}
	runs(certified)
	takes(stated)
	runs(stated)
	takes(signed)
	c.Ready(m)
	runs(signed)
	service = "etcd"
	says(refusedEtcd, refused+"it has no signature of cosign")
	takes(etcd)
	runs(etcd)
	c.Ready(m)

	// Rules are for pods only if they say so.
	starts := func(name, repository, policy string) {
		t.Helper()
		c.Kubectl("run", name, "--image=signed.test/"+repository+":1", "--restart=Never", "--image-pull-policy="+policy)
		c.Eventually(pullBudget, "the pod "+name+" runs", func() error {
			out, err := c.Try("get", "pod", name, "-o", "jsonpath={.status.phase} {.status.containerStatuses[*].state.waiting.message}")
			if err == nil && !strings.HasPrefix(out, "Running") {
				err = errors.New(out)
			}
			return err
		})
	}
	starts("without-rule", refusedPod, "IfNotPresent")
	patch(fmt.Sprintf("machine: {images: {verify: [{prefix: signed.test/, pods: true, keys: [%s]}]}}", base64.StdEncoding.EncodeToString(public)))
	c.Kubectl("run", "refused", "--image=signed.test/"+refusedPod+":1", "--restart=Never", "--image-pull-policy=Always")
	c.Eventually(pullBudget, "the image of the pod is refused", func() error {
		out, err := c.Try("get", "events", "--field-selector", "involvedObject.name=refused", "-o", "jsonpath={.items[*].message}")
		if err == nil && !strings.Contains(out, refused+"it has no signature of cosign") {
			err = errors.New(out)
		}
		return err
	})
	starts("accepted", pod, "IfNotPresent")
	starts("again", pod, "Always")
	m.Reached("images of pods are verified")

	// Kubernetes' own programs are pods, too.
	static := func(repository, want string) {
		t.Helper()
		patch("cluster: {scheduler: {image: signed.test/" + repository + ":1}}")
		c.Eventually(pullBudget, "the scheduler with "+repository+": "+want, func() error {
			out, err := c.Try("-n", "kube-system", "get", "pod", "kube-scheduler-"+c.Nodes[0].Name, "-o",
				"jsonpath={.spec.containers[0].image} {.status.containerStatuses[0].ready} {.status.containerStatuses[0].state.waiting.message}")
			if err == nil && !(strings.HasPrefix(out, "signed.test/"+repository+":1 ") && strings.Contains(out, want)) {
				err = errors.New(out)
			}
			return err
		})
	}
	static(scheduler, ":1 true")
	static(refusedScheduler, refused+"it has no signature of cosign")
	static(scheduler, ":1 true")
	c.Healthy()
	m.Reached("images of static pods are verified")
}
